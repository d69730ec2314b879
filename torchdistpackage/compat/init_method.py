"""This process's place by one of torch's init methods: `env://`, `tcp://HOST:PORT`, `file://PATH`.

What the caller says comes before what a launcher said, and what neither said is asked for.
"""

from dataclasses import replace
from urllib.parse import SplitResult, parse_qs, urlsplit

from torchdistpackage.environment.rendezvous import Env, Rendezvous, detect
from torchdistpackage.errors import LaunchError


def parse_init_method(
    method: str, world_size: int, rank: int, local_rank: int, env: Env
) -> Rendezvous:
    """This process's place by `method`; -1 stands for a number that the caller does not know.

    env://: as the launcher says, whichever it is; one process where there is none.
    tcp://: rank 0 listens on that very port. `?rank=` and `&world_size=` may say the numbers.
    file://: processes of one machine meet at a file, which must not be left over from before.

    Raises:
        LaunchError: the method is another one, or a number is missing or cannot be.
    """
    try:
        url = urlsplit(method)
    except ValueError as error:
        raise LaunchError(f"init method {method!r} is no URL: {error}") from error
    query = {name.upper(): values[-1] for name, values in parse_qs(url.query).items()}
    said = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank}
    given = {name: str(number) for name, number in said.items() if number != -1}
    given = {name: query[name] for name in ("RANK", "WORLD_SIZE") if name in query} | given
    if given.get("WORLD_SIZE") == "1":
        if given.get("RANK", "0") != "0":
            raise LaunchError(f"rank {given['RANK']} of 1 cannot be; the only rank is 0")
        return replace(detect({}), local_rank=max(local_rank, 0))
    if url.scheme == "env":
        return detect({**env, **given})
    if url.scheme not in ("tcp", "file"):
        raise LaunchError(
            f"init method {method!r} is none of env://, tcp://HOST:PORT and file://PATH; "
            f"use one of them"
        )
    numbers = _numbers(method, given, env)
    if url.scheme == "tcp":
        return detect(_tcp(method, url, numbers))
    if not url.netloc + url.path:
        raise LaunchError(f"init method {method!r} needs the path of a file: file://PATH")
    everyone_here = {"LOCAL_RANK": numbers["RANK"], "LOCAL_WORLD_SIZE": numbers["WORLD_SIZE"]}
    return detect({**everyone_here, **numbers, "TDP_STORE": url.netloc + url.path})


def _numbers(method: str, given: Env, env: Env) -> dict[str, str]:
    """What was given, and from a launcher the rest."""
    numbers = dict(given)
    if missing := [name for name in ("RANK", "WORLD_SIZE") if name not in given]:
        found = detect(env)
        if found.source == "alone":
            raise LaunchError(
                f"init method {method} does not say {' and '.join(missing).lower()}, and no "
                f"launcher does; pass them, or start with torchrun or srun"
            )
        known = {"RANK": found.rank, "WORLD_SIZE": found.world_size}
        numbers |= {name: str(known[name]) for name in missing}
        numbers.setdefault("LOCAL_RANK", str(found.local_rank))
        numbers["LOCAL_WORLD_SIZE"] = str(found.local_world_size)
    return numbers


def _tcp(method: str, url: SplitResult, numbers: Env) -> dict[str, str]:
    try:
        port = url.port
    except ValueError:
        port = None
    if not url.hostname or not port:
        raise LaunchError(f"init method {method!r} needs a host and a port: tcp://HOST:PORT")
    place = {**numbers, "MASTER_ADDR": url.hostname, "MASTER_PORT": str(port)}
    if local := numbers.get("LOCAL_RANK"):
        # at least that many are here; how many more is not known
        place.setdefault("LOCAL_WORLD_SIZE", str(int(local) + 1))
    if url.hostname in ("localhost", "127.0.0.1", "::1"):
        place["LOCAL_WORLD_SIZE"] = numbers["WORLD_SIZE"]
        place.setdefault("LOCAL_RANK", numbers["RANK"])
    return place
