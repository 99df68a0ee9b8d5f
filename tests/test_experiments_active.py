"""While an experiment is active every call has its text, and afterwards none."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import data
from experiment_cases import PUT, ROWS, SHIPPED, SUMS, WRONG, edited
from tuning_cases import prepare

import cunorm
from cunorm import compiling, cuda, execute, kernels, launch
from cunorm.compile_error import CompileError
from cunorm.experiments import examples
from cunorm.plan import Device

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_every_text_that_is_asked_for_is_the_active_one() -> None:
    experiment = edited(SUMS, ("double sum = 0;", "double sum = 1;"))
    assert "double sum = 1;" not in kernels.kernel_source(SUMS, {})
    with experiment.active() as same:
        assert same is experiment
        assert kernels.kernel_source(SUMS, {"A": 1}) == "#define A 1\n" + experiment.source
        assert kernels.kernel_text(ROWS) == SHIPPED[ROWS]
        assert kernels.kernel_text(SUMS, {}) == SHIPPED[SUMS]
    assert kernels.kernel_text(SUMS) == SHIPPED[SUMS]


def test_an_exception_leaves_it() -> None:
    with pytest.raises(KeyError), edited(SUMS, ("double sum = 0;", "double sum = 1;")).active():
        raise KeyError
    assert kernels.replaced == {}


def test_it_is_left_in_another_thread() -> None:
    active = edited(SUMS, ("double sum = 0;", "double sum = 1;")).active()
    active.__enter__()
    seen = []
    thread = threading.Thread(
        target=lambda: (seen.append(kernels.kernel_text(SUMS)), active.__exit__(None, None, None))
    )
    thread.start()
    thread.join()
    assert "double sum = 1;" in seen[0] and kernels.replaced == {}


def test_two_experiments_with_two_kernels() -> None:
    sums, rows = edited(SUMS, ("double sum = 0;", "double sum = 1;")), edited(ROWS, (PUT, PUT.replace("rstd", "0")))
    with sums.active():
        with rows.active():
            assert kernels.replaced == {SUMS: sums.source, ROWS: rows.source}
        assert kernels.replaced == {SUMS: sums.source}


@pytest.mark.parametrize("first_left", [0, 1])
def test_two_experiments_with_one_kernel(first_left: int) -> None:
    """The one entered last runs; each removes only itself, even where their texts are equal."""
    experiments = [edited(SUMS, ("double sum = 0;", f"double sum = {value};")) for value in (1, 2)]
    entered = [experiment.active() for experiment in experiments]
    for active in entered:
        active.__enter__()
    assert kernels.replaced == {SUMS: experiments[1].source}
    entered[first_left].__exit__(None, None, None)
    assert kernels.replaced == {SUMS: experiments[1 - first_left].source}
    entered[1 - first_left].__exit__(None, None, None)
    assert kernels.replaced == {}
    with experiments[0].active():
        with experiments[0].active():
            pass
        assert kernels.replaced == {SUMS: experiments[0].source}


def test_the_text_of_entering_counts() -> None:
    experiment = edited(SUMS, ("double sum = 0;", "double sum = 1;"))
    with experiment.active():
        experiment.source = experiment.source.replace("sum = 1;", "sum = 2;")
        assert "double sum = 1;" in kernels.kernel_text(SUMS)
    with experiment.active():
        assert "double sum = 2;" in kernels.kernel_text(SUMS)


class FakeCupy:
    """Compiles everything, and writes down the texts; a function is what it was compiled of."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        device = lambda index: contextlib.nullcontext()  # noqa: E731
        driver = SimpleNamespace(ctxGetCurrent=lambda: 1, launchKernel=None, launchCooperativeKernel=None)
        runtime = SimpleNamespace(driverGetVersion=lambda: 12030)
        compiler = SimpleNamespace(CompileException=ArithmeticError)
        self.cuda = SimpleNamespace(Device=device, driver=driver, runtime=runtime, compiler=compiler)

    def RawModule(self, code: str, options: Any) -> Any:
        self.compiled.append(code)
        kernel = SimpleNamespace(code=code, ptr=1)
        function = SimpleNamespace(shared_size_bytes=0, max_dynamic_shared_size_bytes=0, kernel=kernel)
        return SimpleNamespace(get_function=lambda name: function)


@pytest.fixture
def fake_cupy(cache_folder: Any, monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setattr(cuda, "cupy", lambda: fake)
    monkeypatch.setattr(cuda, "device", lambda index: Device())
    monkeypatch.setattr(cuda, "gpu_name", lambda index: "a GPU of this test")
    monkeypatch.setattr(compiling, "_functions", {})
    return fake


def texts_of(call: launch.Call) -> list[str]:
    return [function.code for function in call._functions]


def test_calls_are_compiled_of_the_text_of_the_moment(fake_cupy: FakeCupy) -> None:
    experiment = edited(ROWS, (PUT, PUT.replace("rstd", "0")))
    before = prepare(64, 4096)
    assert prepare(64, 4096) is before
    with experiment.active():
        during = prepare(64, 4096)
        assert prepare(64, 4096) is during
    after = prepare(64, 4096)
    assert len(fake_cupy.compiled) == 2, "the shipped function is the one from before"
    assert [experiment.source in text for call in (before, during, after) for text in texts_of(call.run)] == [
        False,
        True,
        False,
    ]
    assert not any(experiment.source in str(key) for key in compiling._functions)


def test_a_call_that_is_being_prepared_meanwhile_is_not_kept(
    fake_cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began with the shipped text, and is done while another is active: it may run, but not come again."""
    experiment = edited(ROWS, (PUT, PUT.replace("rstd", "0")))
    compiling, entered = threading.Event(), threading.Event()
    made = fake_cupy.RawModule

    def slowly(code: str, options: Any) -> Any:
        if experiment.source not in code:
            compiling.set()
            assert entered.wait(10)
        return made(code, options)

    monkeypatch.setattr(fake_cupy, "RawModule", slowly)
    begun: list[Any] = []
    thread = threading.Thread(target=lambda: begun.append(prepare(32, 4096)))
    thread.start()
    assert compiling.wait(10)
    with experiment.active():
        entered.set()
        thread.join()
        assert experiment.source not in texts_of(begun[0].run)[0]
        assert experiment.source in texts_of(prepare(32, 4096).run)[0]


def test_all_launches_of_a_call_have_the_texts_of_one_moment(
    fake_cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others become active after the first of several launches is compiled."""
    chosen = examples.of_kernel("split_merge", Device(), 1)[0].plan
    names = [item.kernel for item in chosen.launches]
    assert len(set(names)) == len(names) > 2
    experiment = edited(names[-1], ("struct Arguments {", "// edited\nstruct Arguments {"))
    made = fake_cupy.RawModule

    with contextlib.ExitStack() as stack:

        def entering(code: str, options: Any) -> Any:
            if not kernels.replaced:
                stack.enter_context(experiment.active())
            return made(code, options)

        monkeypatch.setattr(fake_cupy, "RawModule", entering)
        operands = "x", "residual", "weight", "bias", "y", "running_mean", "running_var", "residual_out", "mean", "rstd"
        call = launch.Call(chosen, operands, 0)
        assert kernels.replaced
    assert not any("// edited" in text for text in texts_of(call))


def test_remembered_calls_are_those_of_their_generation() -> None:
    generation = execute.generation
    execute.forget_prepared()
    execute._remember("of another test", None, generation)  # type: ignore[arg-type]
    assert "of another test" not in execute._calls


def test_tuning_waits_for_experiments_to_end() -> None:
    with (
        edited(ROWS, (PUT, PUT.replace("rstd", "0"))).active(),
        pytest.raises(RuntimeError, match="an experiment with row_block_forward is active"),
    ):
        cunorm.tune("layer_norm", (8, 64))


def test_jax_compiles_again() -> None:
    import jax
    import jax.numpy as jnp

    traced = []

    @jax.jit
    def norm(x: Any) -> Any:
        traced.append(kernels.kernel_text(ROWS))
        return cunorm.layer_norm(x)

    x = jnp.ones((2, 8))
    experiment = edited(ROWS, (PUT, PUT.replace("rstd", "0")))
    norm(x)
    norm(x)
    with experiment.active():
        norm(x)
    norm(x)
    assert [text == experiment.source for text in traced] == [False, True, False]


# ---- On a GPU.


@pytest.mark.gpu
def test_cupy_runs_the_active_text() -> None:
    import cupy

    x = cupy.asarray(data(0, (64, 256)))
    before = cupy.asnumpy(cunorm.layer_norm(x))
    with edited(ROWS, WRONG).active():
        during = cupy.asnumpy(cunorm.layer_norm(x))
    after = cupy.asnumpy(cunorm.layer_norm(x))
    assert before.tobytes() == after.tobytes()
    np.testing.assert_allclose(during, 3 * before, rtol=1e-5)


@pytest.mark.gpu
def test_torch_runs_the_active_text_in_both_directions() -> None:
    """Backward in the thread of PyTorch's own."""
    import torch

    def run() -> tuple[Any, Any]:
        x = torch.from_numpy(data(0, (64, 256))).cuda().requires_grad_()
        y = cunorm.layer_norm(x)
        y.backward(torch.ones_like(y) * torch.arange(256, device="cuda"))
        return y.detach().cpu().numpy(), x.grad.cpu().numpy()

    dx = "results[j] = dx_of("
    experiment = edited("row_block_backward", (dx, dx.replace("= ", "= 3 * ")))
    before = run()
    with edited(ROWS, WRONG).active(), experiment.active():
        during = run()
    after = run()
    assert [array.tobytes() for array in before] == [array.tobytes() for array in after]
    for first, second in zip(before, during):
        np.testing.assert_allclose(second, 3 * first, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_jax_runs_the_active_text() -> None:
    """Also a function that was compiled before, and after that the shipped text again."""
    import jax
    import jax.numpy as jnp

    norm = jax.jit(lambda x: cunorm.layer_norm(x))
    x = jnp.asarray(data(0, (64, 256)))
    before = np.asarray(norm(x))
    with edited(ROWS, WRONG).active():
        during = np.asarray(norm(x))
    after = np.asarray(norm(x))
    assert before.tobytes() == after.tobytes()
    np.testing.assert_allclose(during, 3 * before, rtol=1e-5)


@pytest.mark.gpu
def test_a_text_that_does_not_compile_says_so_at_the_call() -> None:
    import cupy

    x = cupy.asarray(data(0, (64, 256)))
    experiment = edited(ROWS, (PUT, f"nonsense({PUT})"))
    with (
        experiment.active(),
        pytest.raises(CompileError, match=r"kernels/row_block_forward\.cu:\d+: error: .*nonsense"),
    ):
        cunorm.layer_norm(x)
    assert np.isfinite(cupy.asnumpy(cunorm.layer_norm(x))).all()
