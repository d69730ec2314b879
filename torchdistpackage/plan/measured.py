"""The device and the links of a cluster profile in the form that `predict` takes. No torch.

`tdp comm bench --profile FILE` measures them where a run will be; a missing measurement is refused,
with the command that makes it.
"""

from math import inf
from pathlib import Path

from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench.profile import Profile, read
from torchdistpackage.harness.bench.request import NETWORK, NODE
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.plan.step_time import device_of, run_time, unpredicted
from torchdistpackage.predict.collectives import SLOWDOWN, Fabric
from torchdistpackage.predict.devices import Accelerator, Fit, named_device
from torchdistpackage.predict.links import LinkModel

_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p")


def measured_device(
    profile: Profile,
    config: RunConfig,
    path: Path,
    world_size: int,
    ranks_per_node: int | None = None,
) -> Accelerator:
    """Return the device measured in the profile at `path`.

    Raises:
        ConfigError: it lacks the device, or links that `world_size` ranks need, or has measured
            another device than the job asks for.
    """
    speed = profile.device
    if speed is None:
        raise ConfigError(
            f"{path} has links and no device; measure it again with tdp comm bench --profile "
            f"{path}, or name a device with --device"
        )
    requested = device_of(config)
    device = named_device(speed.name)
    if requested is not None and (device is None or device.name != requested.name):
        raise ConfigError(
            f"{path} was measured on {speed.name} of {profile.hosts[0]}, but launch.slurm asks for "
            f"{requested.name}; measure on its nodes with tdp comm bench --slurm, or leave out "
            f"--profile"
        )
    best = max(flops / seconds for times in speed.matmuls.values() for flops, seconds in times)
    links = _links(profile)
    node_size = ranks_per_node or speed.num_ranks
    if not links and world_size > 1:
        raise ConfigError(
            f"{path} has no times of {', '.join(_OPERATIONS)}, from which a step of {world_size} "
            f"ranks is predicted; measure them with tdp comm bench --profile {path}"
        )
    network = _any_line(links, NETWORK)
    if network is None and world_size > node_size:
        raise ConfigError(
            f"{path} has no times between nodes, but {world_size} ranks are on several nodes of "
            f"{node_size}; measure on two nodes or more with tdp comm bench --slurm, or pass "
            f"--ranks-per-node {world_size} if all are on one"
        )
    node = _any_line(links, NODE) or network or LinkModel(0.0, inf)
    network = network or node
    return Accelerator(
        name=speed.name,
        title=f"{speed.name}, as {profile.by} measured it on {profile.date[:10]}",
        peaks={"bfloat16": best},
        memory_bytes_per_s=speed.bytes_per_s,
        memory_bytes=speed.memory_bytes,
        node_bytes_per_s=node.bytes_per_s,
        node_size=speed.num_ranks,
        network_bytes_per_s=network.bytes_per_s,
        cores=1,
        fit=Fit(1.0, 1.0, 1.0),
        is_fitted=False,
        source=str(path),
        matmul_times=speed.matmuls,
        call_s=speed.call_s,
        is_host=speed.name == "cpu",
        activation_s=speed.activation_s,
        attention_s=speed.attention_s,
    )


def other_machine(profile: Profile, config: RunConfig, path: Path, host: str) -> str | None:
    """Return a warning if nothing says that the run will be where the profile at `path` was
    measured: `host` is none of its hosts, and the job requests no type of GPU."""
    if profile.device is None or host in profile.hosts or device_of(config) is not None:
        return None
    return (
        f"{path} was measured on {profile.device.name} of {profile.hosts[0]}, this is {host}, and "
        f"launch.slurm names no type of GPU: if the run will not be there, name its type, such as "
        f"gpus-per-node: h100:8, or measure here with tdp comm bench --profile FILE"
    )


def measured_step_seconds(
    plan: Plan, path: Path, ranks_per_node: int | None, name: str
) -> float | None:
    """Return the seconds of a step that the profile at `path` predicts; None if a step of this plan
    is not predicted.

    name: of the device that the run is on, as the profile has it.

    Raises:
        ConfigError: the profile cannot be read, or does not serve this plan.
    """
    if unpredicted(plan) is not None:
        return None
    profile = read(path)
    if profile.device is not None and profile.device.name != name:
        raise ConfigError(
            f"{path} was measured on {profile.device.name} of {profile.hosts[0]}, but this run is "
            f"on {name}; measure here with tdp comm bench --profile FILE, or remove log.profile"
        )
    device = measured_device(profile, plan.config, path, plan.world_size, ranks_per_node)
    fabric = measured_fabric(profile, device, ranks_per_node)
    return run_time(plan, device, ranks_per_node, fabric).step.total


def measured_fabric(profile: Profile, device: Accelerator, ranks_per_node: int | None) -> Fabric:
    """Return the links of the profile. On a host no communication is hidden, because the host
    itself copies and adds what arrives.
    """
    size = ranks_per_node or device.node_size
    links = _links(profile)
    node = LinkModel(0.0, device.node_bytes_per_s)
    network = LinkModel(0.0, device.network_bytes_per_s)
    slowdown = 1.0 if device.is_host else SLOWDOWN
    return Fabric(node, network, size, slowdown, links)


def _any_line(links: dict[tuple[str, str], LinkModel], link: str) -> LinkModel | None:
    """Return the line of messages over a link, else that of the first operation with one."""
    names = ("p2p", *_OPERATIONS)
    return next((links[name, link] for name in names if (name, link) in links), None)


def _links(profile: Profile) -> dict[tuple[str, str], LinkModel]:
    models: dict[tuple[str, str], LinkModel] = {}
    for operation in _OPERATIONS:
        for link in (NODE, NETWORK):
            link_model = profile.line("data", link, operation, "float32", 2)
            if link_model is not None:
                speed = link_model.fit.bytes_per_s or inf
                models[operation, link] = LinkModel(link_model.fit.latency_s, speed)
    return models
