"""What two processes do together in `test_float8_distributed`: run as `python -m tests.torch.float8_ranks RANK FOLDER`.

Every function is one scenario. What it returns is compared between the ranks by the test.
"""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowcast
from narrowcast.torch.float8_clock import set_clock
from tests.torch.test_float8_state import Net, randn, sgd, state

WORLD = 2


def local(rank, seed):
    """This rank's batch; rank 1 has the larger values."""
    return randn(5, 16, seed=10 * seed + rank, factor=1.0 + 10.0 * rank)


def counted(result):
    """Counts the all-reduces of the clock."""
    original = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        if len(args) > 0 and args[0] == dist.ReduceOp.MAX:
            result["num_reduced"] = result.get("num_reduced", 0) + 1
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    return original


def train(model, inner, rank, num_steps=3, find=None):
    optimizer = sgd(model)
    for seed in range(num_steps):
        model(local(rank, seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(inner)


def ddp(rank):
    net, result = Net(), {}
    original = counted(result)
    wrapped = DistributedDataParallel(net)
    result["state"] = train(wrapped, net, rank)
    dist.all_reduce = original
    largest = max(local(r, 0).abs().max() for r in range(WORLD))
    result["first"] = net.a.float8_amax_history[0, 0] == largest
    result["weights"] = {name: p.detach().clone() for name, p in net.named_parameters()}
    return result


def ddp_around_a_parent(rank):
    net = Net()
    parent = nn.Sequential(net, nn.Linear(4, 4))
    with torch.no_grad():
        parent[1].weight.fill_(0.1)
        parent[1].bias.zero_()
    wrapped = DistributedDataParallel(parent)
    return {"state": train(wrapped, net, rank)}


def ddp_accumulates(rank):
    net = Net()
    wrapped = DistributedDataParallel(net)
    optimizer = sgd(net)
    with wrapped.no_sync():
        wrapped(local(rank, 0)).square().mean().backward()
    wrapped(local(rank, 1) * 0.01).square().mean().backward()
    optimizer.step()
    largest = max(local(r, 0).abs().max() for r in range(WORLD))
    return {"state": state(net), "kept": net.a.float8_amax_history[0, 0] == largest}


def ddp_with_a_layer_that_one_rank_does_not_use(rank):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
            narrowcast.apply(self, {"layers/.": "float8"})

        def forward(self, x):
            return self.layers[rank](x)

    net = Experts()
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    return {"state": train(wrapped, net, rank)}


def a_copy_on_one_rank_only(rank):
    net = Net()
    wrapped = DistributedDataParallel(net)
    train(wrapped, net, rank, num_steps=1)
    ema = copy.deepcopy(net) if rank == 0 else None
    result = {"state": train(wrapped, net, rank)}
    del ema
    return result


def a_model_that_only_one_rank_still_holds(rank):
    first = Net()
    train(DistributedDataParallel(first), first, rank, num_steps=1)
    if rank == 0:
        first.cycle = [first]  # not freed before the garbage collector comes
    del first
    net = Net()
    return {"state": train(DistributedDataParallel(net), net, rank)}


def fsdp(rank):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    def sharded():
        net = Net()
        for layer in (net.a, net.b, net.c):
            fully_shard(layer)
        return fully_shard(net)

    net, result = sharded(), {}
    original = counted(result)
    train(net, net, rank, num_steps=2)
    dist.all_reduce = original
    full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    result["state"] = {name: tensor.clone() for name, tensor in full.items() if "float8" in name}
    result["is_sharded"] = type(net.a.weight).__name__ == "DTensor"
    twin = sharded()
    set_model_state_dict(twin, get_model_state_dict(net))
    result["resumed"] = train(twin, twin, rank, num_steps=2)
    result["expected"] = train(net, net, rank, num_steps=2)
    return result


def without_a_group(rank):
    net = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alone = train(net, net, rank)
    return {"warnings": [str(w.message) for w in caught], "state": alone}


def layers_with_histories_of_two_lengths(rank):
    net, result = Net(), {}
    narrowcast.apply(net, {"b": narrowcast.QuantizedFloat8DTypePolicy("float32", 4, margin=1)})
    original = counted(result)
    result["state"] = train(DistributedDataParallel(net), net, rank)
    dist.all_reduce = original
    return result


def with_a_given_group(rank):
    net = Net()
    set_clock(net, group=dist.group.WORLD)
    return {"state": train(net, net, rank, num_steps=1)}


def loss_scaling(rank):
    from narrowcast.torch.amp import GradScaler

    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler("cpu", growth_interval=2)
    taken = []
    for step in range(4):
        if step < 3 or rank == 0:  # in the last step rank 1 has no gradient at all
            scaler.scale(weight.sum()).backward()
        if step == 1 and rank == 1:
            weight.grad[0] = torch.inf
        taken.append(scaler.step(optimizer))
        scaler.update()
        optimizer.zero_grad()
    return {"taken": taken, "scale": scaler.get_scale()}


SCENARIOS = (
    loss_scaling,
    ddp,
    ddp_around_a_parent,
    ddp_accumulates,
    ddp_with_a_layer_that_one_rank_does_not_use,
    a_copy_on_one_rank_only,
    a_model_that_only_one_rank_still_holds,
    layers_with_histories_of_two_lengths,
    with_a_given_group,
    fsdp,
    without_a_group,
)


def main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    results = {}
    for scenario in SCENARIOS:
        results[scenario.__name__] = scenario(rank)
        dist.barrier()
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
