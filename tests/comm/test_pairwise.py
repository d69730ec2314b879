"""Direct messages between all pairs: a peer that is gone is a CommError with its rank."""

import pytest
import torch

from torchdistpackage.comm.backends import GLOO
from torchdistpackage.comm.group_state import GroupState
from torchdistpackage.comm.transport.pairwise import post_receives, post_sends
from torchdistpackage.errors import CommError


class GroupOfGone:
    """A group whose back end has lost its peers."""

    def send(self, *_: object) -> None:
        raise RuntimeError("Connection closed by peer [10.0.0.1]:23456")

    recv = send


@pytest.mark.parametrize(
    ("post", "says"),
    [(post_receives, "receiving from ranks 4, 9"), (post_sends, "sending to ranks 4, 9")],
)
def test_a_peer_that_is_gone_when_messages_are_posted_is_an_error_with_its_rank(post, says):
    state = GroupState((4, 7, 9), 1, GLOO)
    parts = [torch.zeros(2) for _ in range(3)]
    with pytest.raises(CommError, match=f"{says}.* failed: Connection closed by peer"):
        post(parts, GroupOfGone(), 5000, state=state)
