"""Copies of a model exchange their gradients as they are told to, and can be let go at any time."""

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.ddp import DDP
from accelerate_nb.runtime.world.registry import current_world, forget
from accelerate_nb.utils.dataclasses import DataLoaderConfiguration, DistributedDataParallelKwargs
from tests.peers import Peer, under_both
from tests.ranks import run_on_ranks
from tests.runtime.loops import flat, net, samples, train_epoch


def lets_go_of_its_group() -> None:
    for _ in range(20):
        model = DDP(current_world()).wrap_model(nn.Linear(4, 4))
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        dist.destroy_process_group()
        del model  # the last to know of a group that has ended
    model = DDP(current_world()).wrap_model(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    forget()
    assert (model.reducer, model.logger) == (None, None)


def test_a_model_may_outlive_its_process_group_or_lets_go_of_it_before_that_ends() -> None:
    run_on_ranks(lets_go_of_its_group, 2, limit=30)


LOW_RANK = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 0.5}
# without bf16's hooks, which torch takes with NCCL only, and the batched one, which fails in torch 2.13 itself
PACKING: list[dict[str, Any]] = [
    {},
    {"comm_hook": "fp16"},
    {"comm_hook": "power_sgd", "comm_state_option": LOW_RANK},
    {"comm_hook": "power_sgd", "comm_wrapper": "fp16", "comm_state_option": LOW_RANK},
]


def steps(model: nn.Module, rank: int, size: int) -> list[list[float]]:
    data = samples(6 * 4 * size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for start in range(rank * 4, len(data), size * 4):
        inputs, targets = data[start : start + 4]
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def packed(peer: Peer) -> list[Any]:
    found = []
    utils = peer.door("utils")
    for options in PACKING:
        torch.manual_seed(0)
        hook_type, buckets = utils.DDPCommunicationHookType, {"bucket_cap_mb": 1, "gradient_as_bucket_view": True}
        given = {name: hook_type(value) if isinstance(value, str) else value for name, value in options.items()}
        handler = utils.DistributedDataParallelKwargs(**given, **buckets)
        accelerator = peer.Accelerator(cpu=True, kwargs_handlers=[handler])
        found.append(steps(accelerator.prepare(net()), accelerator.process_index, 2))
    return found


@pytest.mark.slow
def test_gradients_are_packed_as_accelerate_packs_them() -> None:
    both = under_both(packed, 2)
    assert both.ours == both.theirs
    assert len(set(map(str, both.ours[0]))) == len(PACKING)  # each packs in its own way


class Registered:
    """Takes a hook as a model does, also one that this machine can't use."""

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.state, self.name = state, hook.__name__


def test_what_cannot_run_here_packs_with_torchs_own_hooks_and_an_unknown_packing_is_an_error() -> None:
    model = Registered()
    DistributedDataParallelKwargs(comm_hook="batched_power_sgd", comm_state_option=LOW_RANK).register_comm_hook(model)
    assert (model.name, model.state.matrix_approximation_rank) == ("batched_powerSGD_hook", 1)
    DistributedDataParallelKwargs(comm_hook="bf16").register_comm_hook(model)
    assert model.name == "bf16_compress_hook"
    DistributedDataParallelKwargs(comm_hook="power_sgd", comm_wrapper="bf16").register_comm_hook(model)
    assert model.name == "bf16_compress_wrapper_hook"
    with pytest.raises(ConfigurationError, match=r"comm_hook='int4' is not known.*'power_sgd'"):
        DistributedDataParallelKwargs(comm_hook="int4").register_comm_hook(model)
    with pytest.raises(ConfigurationError, match="comm_wrapper='power_sgd' is not known"):
        DistributedDataParallelKwargs(comm_hook="fp16", comm_wrapper="power_sgd").register_comm_hook(model)


def handled(peer: Peer) -> list[Any]:
    utils = peer.door("utils")
    handlers = [
        utils.InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=77)),
        utils.AutocastKwargs(enabled=False, cache_enabled=False),
        utils.GradScalerKwargs(init_scale=8.0, growth_interval=3),
        utils.DistributedDataParallelKwargs(find_unused_parameters=True, static_graph=False, broadcast_buffers=False),
    ]
    accelerator = peer.Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=handlers)
    model = accelerator.prepare(net())
    with accelerator.autocast():
        plain = nn.Linear(2, 2)(torch.ones(1, 2)).dtype
    with accelerator.autocast(utils.AutocastKwargs()):
        mixed = nn.Linear(2, 2)(torch.ones(1, 2)).dtype
    group: Any = dist.group.WORLD
    return [
        dist.get_backend(),
        str(group._get_backend(torch.device("cpu")).options._timeout),
        (model.find_unused_parameters, model.static_graph, model.broadcast_buffers),
        (str(plain), str(mixed)),
        model(torch.ones(2, 8)).tolist(),
        [handler.to_kwargs() for handler in handlers],
        [type(handler)().to_kwargs() for handler in handlers],
    ]


def test_handlers_shape_what_accelerates_shape() -> None:
    both = under_both(handled, 2)
    assert both.ours == both.theirs
    assert both.ours[0][1] == "0:01:17"


def joined(even_batches: bool | None, of_loader: bool) -> list[Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=of_loader))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(19), batch_size=4))
    losses = []
    for _ in range(2):
        with accelerator.join_uneven_inputs([prepared], even_batches=even_batches):
            losses += train_epoch(accelerator, prepared, optimizer, None, loader)
    return [losses, flat(model), getattr(loader.batch_sampler, "even_batches", None)]


def joined_by_hand() -> list[Any]:
    torch.manual_seed(0)
    rank = Accelerator().process_index  # connects the processes; the rest is PyTorch's
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = samples(19)
    losses = []
    for _ in range(2):
        with Join([model]):
            for start in range(rank * 4, 19, 8):
                inputs, targets = data[start : start + 4]
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    return [losses, flat(model)]


def test_uneven_inputs_are_joined_as_one_would_by_hand() -> None:
    by_hand = run_on_ranks(joined_by_hand, 2)
    assert [len(losses) for losses, _ in by_hand] == [6, 4]
    for even_batches, of_loader in ((False, True), (None, False)):
        ours = run_on_ranks(joined, 2, even_batches, of_loader)
        assert [found[:2] for found in ours] == by_hand
        assert [found[2] for found in ours] == [of_loader, of_loader]
    assert [len(found[0]) for found in run_on_ranks(joined, 2, True, False)] == [6, 6]


def joined_alone() -> None:
    warnings.simplefilter("error")
    assert len(joined(False, True)[0]) == 10


def test_one_process_has_nothing_to_join() -> None:
    run_on_ranks(joined_alone, 1)
