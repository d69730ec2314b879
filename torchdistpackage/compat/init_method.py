"""Torch's init methods: this process's rank by `env://`, `tcp://HOST:PORT` or `file://PATH`.

The caller's numbers win over the launcher's; a number that neither gives is an error.
"""

from dataclasses import replace
from urllib.parse import SplitResult, parse_qs, urlsplit

from torchdistpackage.environment.rendezvous import Env, Rendezvous, detect
from torchdistpackage.errors import LaunchError


def parse_init_method(
    method: str, world_size: int, rank: int, local_rank: int, env: Env
) -> Rendezvous:
    """Return this process's rendezvous by `method`; -1 stands for an unknown number.

    env://: the numbers of any launcher; without one, a single process.
    tcp://: rank 0 listens on this port. `?rank=` and `&world_size=` may give the numbers.
    file://: processes of one machine meet at a file, which no earlier job may have left.

    Raises:
        LaunchError: the method is another one, or a number is missing or impossible.
    """
    try:
        url = urlsplit(method)
    except ValueError as error:
        raise LaunchError(
            f"init method {method!r} is not a URL: {error}; write "
            "tcp://HOST:PORT, file://PATH or env://"
        ) from error
    query = {name.upper(): values[-1] for name, values in parse_qs(url.query).items()}
    arguments = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank}
    settings = {name: str(number) for name, number in arguments.items() if number != -1}
    settings = {name: query[name] for name in ("RANK", "WORLD_SIZE") if name in query} | settings
    if settings.get("WORLD_SIZE") == "1":
        if settings.get("RANK", "0") != "0":
            raise LaunchError(f"rank {settings['RANK']} is outside a world of 1; use rank 0")
        return replace(detect({}), local_rank=max(local_rank, 0))
    if url.scheme == "env":
        return detect({**env, **settings})
    if url.scheme not in ("tcp", "file"):
        raise LaunchError(
            f"init method {method!r} is not one of env://, tcp://HOST:PORT and file://PATH; use "
            "one of them"
        )
    numbers = _numbers(method, settings, env)
    if url.scheme == "tcp":
        return detect(_tcp(method, url, numbers))
    if not url.netloc + url.path:
        raise LaunchError(f"init method {method!r} needs the path of a file: file://PATH")
    everyone_here = {"LOCAL_RANK": numbers["RANK"], "LOCAL_WORLD_SIZE": numbers["WORLD_SIZE"]}
    return detect({**everyone_here, **numbers, "TDP_STORE": url.netloc + url.path})


def _numbers(method: str, settings: Env, env: Env) -> dict[str, str]:
    """Return the settings, completed by the launcher's."""
    numbers = dict(settings)
    if missing := [name for name in ("RANK", "WORLD_SIZE") if name not in settings]:
        launcher = detect(env)
        if launcher.source == "alone":
            raise LaunchError(
                f"init method {method} lacks {' and '.join(missing).lower()}, and no launcher sets "
                "them; pass them, or start with torchrun or srun"
            )
        launcher_numbers = {"RANK": launcher.rank, "WORLD_SIZE": launcher.world_size}
        numbers |= {name: str(launcher_numbers[name]) for name in missing}
        numbers.setdefault("LOCAL_RANK", str(launcher.local_rank))
        numbers["LOCAL_WORLD_SIZE"] = str(launcher.local_world_size)
    return numbers


def _tcp(method: str, url: SplitResult, numbers: Env) -> dict[str, str]:
    try:
        port = url.port
    except ValueError:
        port = None
    if not url.hostname or not port:
        raise LaunchError(f"init method {method!r} needs a host and a port: tcp://HOST:PORT")
    rendezvous = {**numbers, "MASTER_ADDR": url.hostname, "MASTER_PORT": str(port)}
    if local := numbers.get("LOCAL_RANK"):
        # this host has at least that many ranks; more are not known
        rendezvous.setdefault("LOCAL_WORLD_SIZE", str(int(local) + 1))
    if url.hostname in ("localhost", "127.0.0.1", "::1"):
        rendezvous["LOCAL_WORLD_SIZE"] = numbers["WORLD_SIZE"]
        rendezvous.setdefault("LOCAL_RANK", numbers["RANK"])
    return rendezvous
