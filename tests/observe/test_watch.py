from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast
from narrowcast.errors import ModelError, PolicyError, PolicyTypeError, UnsupportedError
from narrowcast.observe import Summary, observe
from narrowcast.observe.watch import Watch
from tests.observe.models import Net, batch, net, train

# A step of a float16 model without a loss scaler is enough here.
pytestmark = pytest.mark.filterwarnings("ignore:Layers of this model compute in float16")

ALWAYS = partial(observe, every=1)


def watched(model: nn.Module, steps: int = 3, **options: object) -> Summary:
    with ALWAYS(model, **options) as watch:
        train(model, steps)
    return watch.summary()


def hooks_of(model: nn.Module) -> int:
    from torch.optim.optimizer import _global_optimizer_post_hooks

    return len(_global_optimizer_post_hooks) + sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )


# What is recorded.


def test_every_layer_with_a_policy_has_its_four_tensors() -> None:
    seen = [(one.path, one.tensor) for one in watched(net()).observations]
    layers = [(p, t) for p in ("body", "norm", "head") for t in ("input", "weight", "output", "gradient")]
    assert seen == [("", "input"), *layers]  # the model itself casts what it is given


def test_amax_is_that_of_the_tensors_that_passed() -> None:
    model = net()
    inputs, outputs = [], []
    model.body.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    model.norm.register_forward_pre_hook(lambda m, args: outputs.append(args[0].detach()))
    summary = watched(model, 2)
    assert summary["body", "input"].amax == max(x.abs().max().item() for x in inputs)
    assert summary["norm", "input"].amax == max(x.abs().max().item() for x in outputs)


def test_gradient_is_that_with_respect_to_the_output() -> None:
    model = net()
    found = []
    model.head.register_full_backward_hook(lambda m, grad_in, grad_out: found.append(grad_out[0].abs().max().item()))
    assert watched(model, 1)["head", "gradient"].amax == found[0]


def test_history_has_a_point_for_each_step() -> None:
    summary = watched(net(), 4)
    assert [point.step for point in summary["head", "input"].history] == [0, 1, 2, 3]
    assert (summary.num_steps, summary.num_recorded) == (4, 4)


def test_error_of_a_weight_is_that_of_casting_it() -> None:
    model = net()
    weight = model.head.weight.detach().clone()
    noise = (weight.bfloat16().float() - weight).square().sum()
    expected = 10 * math.log10((weight.square().sum() / noise).item())
    # Sums of 512 float32 squares.
    assert watched(model, 1)["head", "weight"].sqnr_db == pytest.approx(expected, rel=1e-4)


def test_what_arrives_rounded_already_has_no_error_that_could_be_known() -> None:
    summary = watched(net(), 1)
    assert summary["head", "input"].dtype == "bfloat16"
    assert summary["head", "input"].sqnr_db is None
    assert summary["head", "gradient"].underflow is None


def test_norm_rounds_neither_its_input_nor_its_weight() -> None:
    summary = watched(net(), 1)
    assert summary["norm", "weight"].dtype == "float32"
    assert summary["norm", "weight"].sqnr_db is None


def test_output_of_a_linear_layer_is_compared_with_float32() -> None:
    model, layer = net(), nn.Linear(32, 16)
    layer.load_state_dict(model.head.state_dict())
    model.eval()
    given = []
    model.head.register_forward_pre_hook(lambda m, args: given.append(args[0].float()))
    with ALWAYS(model) as watch, torch.no_grad():
        actual = model(batch(0)).float()
    expected = layer(given[0])
    ratio = (expected.square().sum() / (actual - expected).square().sum()).item()
    assert watch.summary()["head", "output"].sqnr_db == pytest.approx(10 * math.log10(ratio), rel=1e-4)


def test_overflow_of_float16_is_told() -> None:
    model = net("mixed_float16")
    with ALWAYS(model.eval()) as watch, torch.no_grad():
        model(batch(0) * 1e5)
    assert watch.summary()["", "input"].saturation > 0.3
    assert watch.summary()["", "input"].amax > 65504


def test_float32_policy_loses_nothing() -> None:
    summary = watched(net("float32"), 1)
    assert all(one.sqnr_db is None and one.underflow is None for one in summary.observations)


def test_steps_with_nan_are_counted_and_do_not_spoil_the_rest() -> None:
    model = net()
    with ALWAYS(model.eval()) as watch, torch.no_grad():
        model(batch(0))
        model(batch(1).fill_(math.nan))
    one = watch.summary()["", "input"]
    assert one.num_nonfinite_steps == 1
    assert one.amax == batch(0).abs().max().item()
    assert "(root), input: NaN or infinity in 1 of 2 steps" in str(watch.summary())


# Steps.


def test_layer_used_twice_is_one_tensor_with_the_larger_amax() -> None:
    model = net(uses=3)
    inputs = []
    model.body.register_forward_pre_hook(lambda m, args: inputs.append(args[0].abs().max().item()))
    one = watched(model, 1)["body", "input"]
    assert (one.num_steps, one.amax) == (1, max(inputs))
    assert one.num_elements == 3 * 8 * 32


def test_weight_of_a_layer_used_twice_counts_once() -> None:
    assert watched(net(uses=3), 1)["body", "weight"].num_elements == 32 * 32


def test_accumulated_batches_are_one_step() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ALWAYS(model) as watch:
        for _ in range(2):
            for micro in range(4):
                model(batch(micro)).sum().backward()
            optimizer.step()
    summary = watch.summary()
    assert summary.num_steps == 2
    assert summary["body", "gradient"].num_elements == 2 * 4 * 8 * 32


def test_two_optimizers_of_one_model_make_one_step() -> None:
    model = net()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.body, model.head)]
    with ALWAYS(model) as watch:
        for step in range(3):
            model(batch(step)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert watch.summary().num_steps == 3


def test_optimizer_of_another_model_ends_no_step() -> None:
    model, other = net(), nn.Linear(2, 2)
    with ALWAYS(model) as watch:
        for step in range(3):
            model(batch(step)).sum().backward()
            other(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert watch.summary().num_steps == 1


def test_optimizers_that_step_inside_backward_make_one_step_a_batch() -> None:
    model = net()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with ALWAYS(model) as watch:
        for step in range(3):
            model(batch(step)).sum().backward()
    assert watch.summary().num_steps == 3
    assert watch.summary()["body", "gradient"].num_steps == 3


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_recomputation_is_not_counted_twice(is_reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = super().forward
            return checkpoint(inner, x, use_reentrant=is_reentrant)

    torch.manual_seed(0)
    plain, model = Net(), Checkpointed()
    model.load_state_dict(plain.state_dict())
    found = []
    for one in (plain, model):
        narrowcast.apply(one, {"body": "mixed_bfloat16", "head": "mixed_bfloat16", "norm": "mixed_bfloat16"})
        with ALWAYS(one) as watch:
            one(batch(0).requires_grad_()).float().square().mean().backward()
        found.append(watch.summary().observations)
    assert found[0] == found[1]
    assert any(one.tensor == "gradient" for one in found[1])


def test_validation_between_steps_is_left_out() -> None:
    model = net()
    with ALWAYS(model) as watch:
        train(model, 1)
        model.eval()
        with torch.no_grad():
            model(batch(0) * 1e6)
        model.train()
        train(model, 1)
    assert watch.summary()["body", "input"].amax < 10
    assert watch.summary().num_steps == 2


def test_every_pass_of_a_model_in_eval_mode_is_a_step() -> None:
    model = net().eval()
    with ALWAYS(model) as watch, torch.inference_mode():
        for step in range(3):
            model(batch(step))
    assert watch.summary().num_steps == 3
    assert ("body", "gradient") not in {(one.path, one.tensor) for one in watch.summary().observations}


def test_step_without_an_optimizer_counts_when_the_context_ends() -> None:
    model = net()
    with ALWAYS(model) as watch:
        model(batch(0)).sum().backward()
    assert watch.summary()["head", "gradient"].num_steps == 1


def test_every_tenth_step_is_recorded() -> None:
    model = net()
    with observe(model, every=10) as watch:
        train(model, 25)
    assert [point.step for point in watch.summary()["body", "input"].history] == [0, 10, 20]


def test_time_decides_where_no_interval_is_given() -> None:
    model = net()
    with observe(model, overhead=1e-6) as watch:
        train(model, 20)
    assert (watch.summary().num_steps, watch.summary().num_recorded) == (20, 1)


def test_long_histories_are_thinned_evenly() -> None:
    model = net()
    with ALWAYS(model, num_points=4) as watch:
        train(model, 30)
    steps = [point.step for point in watch.summary()["body", "input"].history]
    assert 4 <= len(steps) <= 8
    assert len({b - a for a, b in itertools.pairwise(steps)}) == 1
    assert watch.summary()["body", "input"].num_steps == 30


# What stays as it was.


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float32"])
def test_training_gives_the_same_bits_watched_and_not(policy: str) -> None:
    alone, seen = net(policy, uses=2), net(policy, uses=2)
    expected = train(alone, 4)
    with ALWAYS(seen):
        actual = train(seen, 4)
    assert actual == expected
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), seen.parameters(), strict=True))


def test_random_numbers_go_on_as_if_nobody_looked() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    model = net()
    state = torch.get_rng_state()
    watched(model, 2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), expected)


def test_hooks_are_gone_when_the_context_ends() -> None:
    model = net()
    before = hooks_of(model)
    watched(model, 1)
    assert hooks_of(model) == before


def test_hooks_are_gone_after_an_exception_and_what_was_seen_stays() -> None:
    model = net()
    before = hooks_of(model)
    watch = ALWAYS(model)
    with contextlib.suppress(KeyboardInterrupt), watch:
        train(model, 2)
        raise KeyboardInterrupt
    assert hooks_of(model) == before
    assert watch.summary().num_recorded == 2


def test_two_observations_at_once_see_the_same() -> None:
    model = net()
    with ALWAYS(model) as outer, ALWAYS(model) as inner:
        train(model, 2)
    assert outer.summary().observations == inner.summary().observations


def test_part_of_a_model_is_observed_by_itself() -> None:
    model = net()
    with ALWAYS(model.head) as watch:
        train(model, 2)
    assert {one.path for one in watch.summary().observations} == {""}
    assert "(root)" in str(watch.summary())


def test_no_tensor_of_the_graph_is_kept_alive() -> None:
    model = net()
    with ALWAYS(model) as watch:
        hidden = model.body(batch(0))
        gone = weakref.ref(hidden)
        hidden.sum().backward()
        del hidden
        gc.collect()
        assert gone() is None
    assert watch.summary()["body", "output"].amax > 0


def test_model_is_let_go_when_the_context_ends() -> None:
    model = net()
    with ALWAYS(model) as watch:
        train(model, 1)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert watch.summary().num_steps == 1


def test_copies_made_inside_are_not_watched() -> None:
    model = net()
    with ALWAYS(model) as watch:
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied(batch(0) * 1e6)
        train(model, 1)
    assert watch.summary()["body", "input"].amax < 10


def test_backward_after_the_context_is_harmless() -> None:
    model = net()
    with ALWAYS(model) as watch:
        loss = model(batch(0)).sum()
    loss.backward()
    assert ("head", "gradient") not in {(one.path, one.tensor) for one in watch.summary().observations}


def test_outer_autocast_does_not_reach_the_comparison() -> None:
    model = net().eval()
    found = []
    for is_enabled in (False, True):
        with ALWAYS(model) as watch, torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            model.head(batch(0))
        found.append(watch.summary()["head", "output"].sqnr_db)
    assert found[0] == found[1]


# Writers and errors.


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))


def test_writer_gets_each_number_of_each_step() -> None:
    writer = Writer()
    summary = watched(net(), 2, writer=writer)
    written = {(tag, step): value for tag, value, step in writer.scalars}
    point = summary["body", "weight"].history[1]
    assert written["narrowcast/body/weight/amax", 1] == point.amax
    assert written["narrowcast/body/weight/sqnr_db", 1] == point.sqnr_db
    assert all(isinstance(value, float) and math.isfinite(value) for value in written.values())


def test_model_without_policies_is_refused() -> None:
    with pytest.raises(ModelError) as caught, observe(Net()):
        pass
    assert str(caught.value) == (
        "Net has no layer that carries a policy, so nothing is rounded that could be observed. "
        "Call `narrowcast.apply(model, policy)` first."
    )


def test_something_else_than_a_module_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Model cannot be observed\. Got type='builtins\.dict'"):
        observe({})


@pytest.mark.parametrize("options", [{"every": 0}, {"max_elements": True}, {"num_points": 2.5}])
def test_counts_that_are_no_counts_are_refused(options: dict[str, object]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(PolicyError) as caught:
        observe(net(), **options)
    assert str(caught.value) == (
        f"Argument {name!r} of observe is not usable. Got {name}={value!r}. Expected an integer of at least 1."
    )


@pytest.mark.parametrize("overhead", [0, -1.0, True, "10%"])
def test_overhead_that_is_no_share_is_refused(overhead: object) -> None:
    with pytest.raises(PolicyError, match="Expected a share of the steps' time above 0"):
        observe(net(), overhead=overhead)


def test_writer_that_takes_no_scalars_is_refused() -> None:
    with pytest.raises(PolicyTypeError, match=r"Writer cannot take scalars.*add_scalar\(tag, value, step\)"):
        observe(net(), writer=print)


def test_summary_of_nothing_is_refused() -> None:
    model = net()
    with observe(model) as watch:
        model.eval()(batch(0))
    with pytest.raises(ModelError, match="No pass of Net in training mode was seen, so there is nothing to sum up"):
        watch.summary()


def test_observation_cannot_be_made_twice() -> None:
    model = net()
    with observe(model) as watch:
        train(model, 1)
    with pytest.raises(ModelError, match="This observation was made already"), watch:
        pass


def test_compiled_model_is_refused() -> None:
    model = net()
    before = hooks_of(model)
    with (
        pytest.raises(UnsupportedError, match="The model is compiled, and hooks"),
        observe(torch.compile(model, backend="eager")),
    ):
        pass
    model.body.compile(backend="eager")
    with pytest.raises(UnsupportedError, match="Layer 'body' is compiled, and hooks"), observe(model):
        pass
    assert hooks_of(model) == before


def test_compiling_around_an_observed_model_breaks_the_graph_and_still_records() -> None:
    import torch._dynamo

    model = net().eval()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: model(x), backend="eager")
    with ALWAYS(model) as watch, torch.no_grad():
        compiled(batch(0))
    assert watch.summary()["body", "input"].num_steps == 1


def test_package_can_be_called() -> None:
    import narrowcast.observe as package

    assert isinstance(package(net()), Watch)  # type: ignore[operator]
