"""`prepare_trainer`: Hugging Face's Trainer over the shards of a model, one process each.

The Trainer and its Accelerator treat every process as a replica with its own data. Here the ranks
of a tensor group get the same batches, gradients are averaged over the data axis only, each element
counts once in their norm, and the original model is saved. The rest of the Trainer is unchanged.
"""

from typing import Any

from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group, gather_objects, ranks_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.errors import CheckpointError, LayoutError
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.parallel.auto.pretrained_calls import PretrainedCalls
from torchdistpackage.parallel.auto.saving import save_tensor_parallel


def prepare_trainer(trainer: Any) -> Any:
    """Return `trainer`, a `transformers.Trainer`, prepared for a model that `tensor_parallel` split
    over processes.

    Call it once, before `train()` and `evaluate()`. Data parallelism is over tpc's data axis, by
    `NaiveDDP`, or by a `ZeroOptimizer` that is `trainer.optimizer`, made after the Trainer, which
    moves the model to its device. `save_model` and checkpoints write the files of the model that
    was split; all ranks call it.

    Raises:
        LayoutError: the model is not split so, or options do not go with it; names all such.
    """
    model, args = trainer.model, trainer.args
    if problems := problems_of(trainer):
        raise LayoutError("this Trainer cannot be prepared: " + "; ".join(problems))
    group: Group = model.split_root._group
    accelerator = trainer.accelerator
    kind = type(accelerator)
    accelerator.__class__ = type(kind.__name__, (ShardedAcceleration, kind), {})
    accelerator.trainer_of_shards = trainer
    trainer.get_tp_size = group.size
    trainer.gather_function = accelerator.gather_for_metrics  # it has kept the method of before

    def save_model(output_dir: str | None = None, _internal_call: bool = False) -> None:
        if is_zero(trainer):
            bare_optimizer(trainer).finish()  # stage 3 has freed what is saved
        with save_tensor_parallel(model):
            state = model.state_dict()
        own_error: Exception | None = None
        try:
            if args.should_save:
                trainer._save(output_dir, state_dict=state)
        except Exception as error:
            own_error = error
        for failure in gather_objects(None if own_error is None else repr(own_error), group):
            if failure is not None:
                folder = output_dir or args.output_dir
                raise CheckpointError(f"{folder} cannot be written: {failure}") from own_error

    trainer.save_model = save_model
    return trainer


def problems_of(trainer: Any) -> list[str]:
    model, args = trainer.model, trainer.args
    group = model.split_root._group if isinstance(model, PretrainedCalls) else None
    if group is None:
        return [
            f"its model is a {type(model).__name__} in one process; split a Hugging Face model by "
            f"tensor_parallel(model, distributed=True)"
        ]
    if not tpc.is_set:
        return ["tpc is not set up; call tpc.setup_process_groups([('data', n), ('tensor', m)])"]
    problems = []
    if ranks_of(group) != tuple(tpc.get_ranks_in_group("tensor")):
        problems.append(
            f"the model is split over ranks {ranks_of(group)}, tpc's tensor group is "
            f"{tuple(tpc.get_ranks_in_group('tensor'))}; leave out group= in tensor_parallel"
        )
    num_ranks = group.size() * tpc.get_group_size("data")
    if trainer.accelerator.num_processes != num_ranks:
        problems.append(
            f"accelerate knows of {trainer.accelerator.num_processes} processes, and data x tensor "
            f"has {num_ranks} ranks; start it by torchrun, or set RANK, LOCAL_RANK and WORLD_SIZE"
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        problems.append("DeepSpeed or FSDP is on; set trainer.optimizer to a ZeroOptimizer")
    if args.fp16:
        problems.append("fp16=True scales by what each rank sees of the gradients; use bf16=True")
    if args.save_strategy != "no" and not args.save_only_model:
        problems.append(
            "the Trainer saves the first rank's part of the optimizer's state alone; pass "
            "save_only_model=True, and keep that state in checkpoints of this package"
        )
    if args.load_best_model_at_end:
        problems.append(
            "load_best_model_at_end loads whole weights into shards; load them afterwards"
        )
    if args.eval_use_gather_object:
        problems.append("eval_use_gather_object=True gathers over shards too; return tensors")
    if trainer.accelerator.dispatch_batches:
        problems.append("dispatch_batches=True sends each process other samples; leave it out")
    return problems


def is_zero(trainer: Any) -> bool:
    """Return whether the optimizer averages the gradients itself."""
    return isinstance(bare_optimizer(trainer), ShardedOptimizer)


def bare_optimizer(trainer: Any) -> Any:
    """Return the optimizer without accelerate's wrapper."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


class ShardedAcceleration:
    """The methods of a prepared Trainer's Accelerator that differ from accelerate's."""

    trainer_of_shards: Any
    _gathers_over_data = False

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model without torch's data parallelism, which would average over shards too;
        the model stays on its device.
        """
        of_library: Any = super()
        prepared: nn.Module = of_library.prepare_model(model, False, True)
        if evaluation_mode or is_zero(self.trainer_of_shards):
            return prepared
        return NaiveDDP(prepared, process_group=tpc.get_group("data"))

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer without moving its state: a ZeroOptimizer's state belongs to this
        rank.
        """
        of_library: Any = super()
        return of_library.prepare_optimizer(optimizer, device_placement=False)

    def prepare_data_loader(self: Any, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader whose batches follow the position on the data axis."""
        from accelerate.data_loader import prepare_data_loader

        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=tpc.get_group_size("data"),
            process_index=tpc.get_group_rank("data"),
            split_batches=self.split_batches,
            put_on_device=self.device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def gather_for_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Gather over the data axis, so that each sample counts once."""
        of_library: Any = super()
        self._gathers_over_data = True
        try:
            return of_library.gather_for_metrics(*args, **kwargs)
        finally:
            self._gathers_over_data = False

    def gather(self, tensor: Any) -> Any:
        from accelerate.utils import recursively_apply

        if not self._gathers_over_data:
            of_library: Any = super()
            return of_library.gather(tensor)
        return recursively_apply(joined_over_data, tensor, error_on_other_type=True)

    def clip_grad_norm_(
        self: Any, parameters: Any, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip by the norm of the gradients of the unsplit model, and return it."""
        self.unscale_gradients()
        return clip_grad_norm_(list(parameters), max_norm, norm_type)


def joined_over_data(tensor: Tensor) -> Tensor:
    rows = (tensor if tensor.dim() else tensor[None]).detach().contiguous()
    return collectives.all_gather(rows, 0, tpc.get_group("data"))
