"""The preference losses that `train.dpo.loss` offers, one row each. No torch.

The values of the key, the need for a reference model, the keys that go with it, the loss object and
the table of docs/preference.md (scripts/docs) follow from a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torchdistpackage.text import markdown_table


@dataclass(frozen=True, slots=True)
class PreferenceLossSpec:
    """One preference loss.

    loss: "module:function" of the loss of each pair, as `sigmoid` of train/preference_losses.py.
    has_reference: scores are log-probabilities relative to a frozen reference. is_mean: the
    log-probability of an answer is a mean over its tokens, not a sum. is_unpaired: it takes
    labelled answers instead of pairs. takes: keys of train.dpo that it reads besides loss and beta.
    formula, source, trl: its row in docs/preference.md; trl: the setting there.
    """

    name: str
    loss: str
    has_reference: bool = True
    is_mean: bool = False
    is_unpaired: bool = False
    takes: tuple[str, ...] = ()
    formula: str = ""
    source: str = ""
    trl: str = ""


_LOSSES = "torchdistpackage.train.preference_losses"

PREFERENCE_LOSSES: Mapping[str, PreferenceLossSpec] = {
    spec.name: spec
    for spec in (
        PreferenceLossSpec(
            "sigmoid",
            f"{_LOSSES}:sigmoid",
            takes=("label_smoothing",),
            formula="`-(1 - s) log sigmoid(beta m) - s log sigmoid(-beta m)`",
            source="DPO, [Rafailov et al., 2023](https://arxiv.org/abs/2305.18290); `s`: Mitchell, "
            "2023",
            trl='`DPOTrainer`, `loss_type="sigmoid"`',
        ),
        PreferenceLossSpec(
            "sigmoid_norm",
            f"{_LOSSES}:sigmoid",
            is_mean=True,
            takes=("label_smoothing",),
            formula="the same",
            source="DPO with length normalization, "
            "[Lambert et al., 2024](https://arxiv.org/abs/2411.15124)",
            trl='`DPOTrainer`, `loss_type="sigmoid_norm"`',
        ),
        PreferenceLossSpec(
            "hinge",
            f"{_LOSSES}:hinge",
            formula="`max(0, 1 - beta m)`",
            source="[Zhao et al., 2023](https://arxiv.org/abs/2305.10425)",
            trl='`DPOTrainer`, `loss_type="hinge"`',
        ),
        PreferenceLossSpec(
            "ipo",
            f"{_LOSSES}:ipo",
            is_mean=True,
            formula="`(m - 1 / (2 beta))^2`",
            source="IPO, [Azar et al., 2023](https://arxiv.org/abs/2310.12036), equation 17, with "
            "means as its authors advise",
            trl='`DPOTrainer`, `loss_type="ipo"`',
        ),
        PreferenceLossSpec(
            "simpo",
            f"{_LOSSES}:simpo",
            has_reference=False,
            is_mean=True,
            takes=("label_smoothing", "gamma"),
            formula="as `sigmoid`, of `beta m - gamma`",
            source="SimPO, [Meng et al., 2024](https://arxiv.org/abs/2405.14734), equation 6",
            trl='`CPOTrainer`, `loss_type="simpo"`, `cpo_alpha=0`',
        ),
        PreferenceLossSpec(
            "orpo",
            f"{_LOSSES}:orpo",
            has_reference=False,
            is_mean=True,
            formula="`-chosen - beta log sigmoid(log odds of chosen - log odds of rejected)`",
            source="ORPO, [Hong et al., 2024](https://arxiv.org/abs/2403.07691), equation 6",
            trl="`ORPOTrainer`, whose first term also counts the tokens of prompts",
        ),
        PreferenceLossSpec(
            "kto",
            f"{_LOSSES}:kto",
            is_unpaired=True,
            takes=("desirable_weight", "undesirable_weight"),
            formula="of [labelled answers](#kto): `w (1 - sigmoid(beta (score - kl)))` of a good "
            "one, `w (1 - sigmoid(beta (kl - score)))` of a bad one",
            source="KTO, [Ethayarajh et al., 2024](https://arxiv.org/abs/2402.01306), equation 8",
            trl='`KTOTrainer`, `loss_type="kto"`',
        ),
    )
}


def page_rows() -> str:
    """Return the table of docs/preference.md."""
    rows = (
        (
            f"`{x.name}`",
            x.formula,
            "yes" if x.has_reference else "no",
            "mean" if x.is_mean else "sum",
            x.source,
            x.trl,
        )
        for x in PREFERENCE_LOSSES.values()
    )
    heads = ("`loss`", "loss of a pair", "reference", "over tokens", "from", "in trl")
    return markdown_table(heads, rows)
