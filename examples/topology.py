"""Who is where: three axes over all ranks, a collective in a group, a message along the pipeline.

    python examples/topology.py                                     eight ranks on this machine
    torchrun --nproc-per-node 4 examples/topology.py                or any multiple of 4

Prints how many different tensors there are at the end: one in each model replica.
"""

# fmt: off
# isort: off
import torch
import torch.distributed as dist
from torchdistpackage import setup_distributed_slurm,test_comm,tpc
from torchdistpackage import run_or_launch


def main():
    # init torch disttributed
    setup_distributed_slurm()
    world_size = dist.get_world_size()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    # init process groups
    pp_size=2
    tp_size=2
    dist_config = [('data',world_size/(2*pp_size)), ('pipe',pp_size), ('tensor',tp_size)]
    tpc.setup_process_groups(dist_config)

    torch.manual_seed(dist.get_rank())

    # test communication in groups
    tmp = torch.rand([100,1024]).to(device)

    # collective
    dist.broadcast(tmp, tpc.get_ranks_in_group('model')[0], tpc.get_group('model'))

    # p2p
    if tpc.is_first_in_pipeline_group():
        dist.send(tmp, tpc.get_next_global_rank('pipe'))
    if tpc.is_last_in_pipeline_group():
        dist.recv(tmp, tpc.get_prev_global_rank('pipe'))

    # every group at once, each number compared with the one it must be
    test_comm()
    sums = [None] * world_size
    dist.all_gather_object(sums, tmp.sum().item())
    if dist.get_rank() == 0:
        print(f"{world_size} ranks hold {len(set(sums))} different tensors "
              f"in {tpc.get_dp_size()} model replicas")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_or_launch(main, num_procs=8)
