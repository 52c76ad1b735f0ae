"""What a GPU can lack at the start, and how one fails while it serves: one plain line each. No GPU is needed."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.core.fake_gpus import fake_gpus
from tests.core.fake_plugins import answering

from mini_infer import EngineError, SamplingParams
from mini_infer.build.device import device_faults_in_plain_words, resolve_device
from mini_infer.build.kv_memory import DeviceMemory, free_memory, plan_kv_memory
from mini_infer.cli import main
from mini_infer.errors import ConfigError, DeviceError, RequestError
from mini_infer.gpu import expect_gpu
from mini_infer.interfaces import KVCacheSpec
from mini_infer.messages import EngineRequest
from mini_infer.sampling.sampler import ReferenceSampler
from mini_infer.settings import EngineSettings
from mini_infer.testing.engines import make_engine, make_llm, run_engine, tiny_model

ILLEGAL = (
    "CUDA error: an illegal memory access was encountered\n"
    "Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/ for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to ..."
)
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver."


# -- the device --------------------------------------------------------------------------------------------------------


def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")


def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 0, init_error=RuntimeError("No CUDA GPUs are available"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")


LACKS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "a PyTorch without CUDA": (
        without_cuda,
        "PyTorch 2.13.0+cpu is built without CUDA",
        "install a build with it (pytorch.org)",
    ),
    "no driver": (
        lambda patch: fake_gpus(patch, 0, init_error=RuntimeError(NO_DRIVER)),
        "there is no NVIDIA driver",
        "install one",
    ),
    "a driver too old": (
        lambda patch: fake_gpus(patch, 0, init_error=RuntimeError(TOO_OLD)),
        "the NVIDIA driver is too old for PyTorch 2.13.0+cu130: it goes up to CUDA 11.4",
        "update the driver, or install a PyTorch built for CUDA 11.4",
    ),
    "no GPU": (
        lambda patch: fake_gpus(patch, 0, init_error=RuntimeError("No CUDA GPUs are available")),
        "torch sees no GPU",
        "see whether nvidia-smi does",
    ),
    "hidden GPUs": (hidden, "torch sees no GPU while CUDA_VISIBLE_DEVICES is '7'", "change or unset that"),
    "a start that fails": (
        lambda patch: fake_gpus(patch, 0, init_error=RuntimeError("CUDA unknown error - this may be.\nMore.")),
        "CUDA does not start: CUDA unknown error - this may be",
        "see what nvidia-smi says",
    ),
    "a generation that torch has no kernels for": (
        lambda patch: fake_gpus(patch, capability=(3, 7), name="Tesla K80"),
        "PyTorch 2.13.0+cu130 has no kernels for cuda:0 (Tesla K80, compute capability 3.7), only sm_75, sm_80, sm_90",
        "install a build that has them (pytorch.org)",
    ),
}


@pytest.mark.parametrize("lack", LACKS)
def test_a_gpu_that_was_asked_for_and_cannot_be_used(lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrange, why, remedy = LACKS[lack]
    arrange(monkeypatch)
    with pytest.raises(ConfigError) as error:
        resolve_device("cuda")
    assert str(error.value) == f"engine.device is 'cuda', but {why}: {remedy}, or set engine.device to 'cpu'"
    device, choice = resolve_device("auto")
    assert device == "cpu" and choice is not None and choice.reason == why
    assert resolve_device("cpu") == ("cpu", None)


@pytest.mark.parametrize(("count", "told"), [(1, "1 GPU: take cuda:0"), (8, "8 GPUs: take cuda:0 to cuda:7")])
def test_an_index_past_the_last(count: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, count)
    with pytest.raises(ConfigError) as error:
        resolve_device("cuda:99")
    assert str(error.value) == f"engine.device is 'cuda:99', but torch sees {told}, or set engine.device to 'cpu'"
    assert resolve_device(f"cuda:{count - 1}") == (f"cuda:{count - 1}", None)


@pytest.mark.parametrize(
    ("capability", "arch_list", "fits"),
    [
        ((8, 6), ("sm_80",), True),  # the same generation, a higher minor number
        ((8, 0), ("sm_86",), False),
        ((12, 1), ("sm_90", "compute_120"), True),  # the driver compiles PTX for what came later
        ((10, 0), ("compute_120",), False),
        ((9, 0), ("sm_90a",), True),
        ((10, 0), ("sm_90a", "compute_90a"), False),  # these letters are for one card only
        ((7, 5), (), True),
    ],
)
def test_which_kernels_a_card_runs(
    capability: tuple[int, int], arch_list: tuple[str, ...], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(monkeypatch, capability=capability, arch_list=arch_list)
    assert (resolve_device("auto")[0] == "cuda:0") is fits


def test_what_torch_warns_of_is_not_said_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 0, init_error=RuntimeError(TOO_OLD))

    def is_available() -> bool:
        warnings.warn(f"CUDA initialization: {TOO_OLD}", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_device("auto")[0] == "cpu"


def test_bfloat16_on_a_card_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, capability=(7, 5), name="Tesla T4")
    with pytest.raises(ConfigError) as error:
        make_engine("toy", device="cuda", dtype="bfloat16")
    assert str(error.value) == (
        "bfloat16 needs compute capability 8.0, this is cuda:0 (Tesla T4, compute capability 7.5): "
        "set engine.dtype to 'float16' or 'float32'"
    )


def test_a_plugin_on_a_device_that_it_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, capability=(8, 6), name="A10")
    expect_gpu("mine", "cuda:0", (8, 6))
    with pytest.raises(ConfigError, match=r"^plugin mine runs on a GPU, not on cpu: leave it out$"):
        expect_gpu("mine", "cpu")
    with pytest.raises(ConfigError) as error:
        expect_gpu("mine", "cuda:0", (9, 0))
    assert str(error.value) == (
        "plugin mine needs compute capability 9.0, this is cuda:0 (A10, compute capability 8.6): leave it out with "
        "without = ['mine'], or set plugins = [] to leave out all"
    )


# -- memory ------------------------------------------------------------------------------------------------------------


def with_free_memory(monkeypatch: pytest.MonkeyPatch, free: int, total: int = 80 << 30) -> None:
    fake_gpus(monkeypatch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, total))


def test_a_model_larger_than_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free_memory(monkeypatch, 1 << 10)
    with pytest.raises(ConfigError, match=r"^the model does not fit: its weights need .* 1 KiB are free on cuda:0: \S"):
        make_engine("toy", device="cuda")


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({}, r"one block needs 8 MiB, 4 MiB are free on cuda:0: lower engine\.block_size or free memory"),
        ({"num_kv_blocks": 1000}, r"1000 blocks need .*, 16 GiB .*: lower engine\.num_kv_blocks"),
        ({"kv_cache_memory": "99GiB"}, r"\d+ blocks need .*, 16 GiB .*: lower engine\.kv_cache_memory"),
        ({"max_model_len": 131072}, r"one sequence of engine\.max_model_len 131072 needs 64 GiB, .* lower engine\.max"),
    ],
)
def test_a_card_too_small_for_one_sequence(engine: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free_memory(monkeypatch, 16 << 30 if engine else 4 << 20)
    specs = [KVCacheSpec("full", 8, 128, 128, "bfloat16")] * 128
    if "num_kv_blocks" in engine:
        specs *= 4
    with pytest.raises(ConfigError, match=f"^the KV cache does not fit: {told}"):
        memory = DeviceMemory("cuda:0", *free_memory("cuda:0"))
        plan_kv_memory(EngineSettings(**engine), specs, block_size=16, memory=memory, model_max_len=131072)


# -- while the engine is built -----------------------------------------------------------------------------------------


class OutOfResources(Exception):  # noqa: N818 (Triton's name)
    __module__ = "triton.runtime.errors"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            torch.AcceleratorError(ILLEGAL),
            "failed .*: CUDA error: an illegal memory access was encountered: see",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
            "failed .*: CUDA error: CUBLAS_STATUS_",
        ),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), r"failed .*: Triton Error \[CUDA\]: dev"),
    ],
)
def test_a_device_that_fails_while_the_engine_is_built(error: Exception, told: str) -> None:
    with pytest.raises(ConfigError, match=f"^cuda:0 {told}") as raised, device_faults_in_plain_words("cuda:0"):
        raise error
    assert "\n" not in str(raised.value)


def test_a_kernel_that_the_card_is_too_small_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, capability=(8, 6), name="A10")
    error = OutOfResources("out of resource: shared memory,\nRequired: 131072, Hardware limit: 101376. " + "x" * 400)
    with pytest.raises(ConfigError) as raised, device_faults_in_plain_words("cuda:0"):
        raise error
    line = str(raised.value)
    assert line.startswith(
        "a Triton kernel does not run on cuda:0 (A10, compute capability 8.6): OutOfResources: out of resource: shared "
        "memory, Required: 131072, Hardware limit: 101376. xxx"
    )
    assert line.endswith("xxx...: leave out the plugin that brings it, or set plugins = [] to leave out all")
    assert len(line) < 500


def test_other_errors_go_through() -> None:
    for error in (ValueError("CUDA error"), RuntimeError("something else"), torch.OutOfMemoryError("CUDA out of")):
        with pytest.raises(type(error)) as raised, device_faults_in_plain_words("cuda:0"):
            raise error
        assert raised.value is error


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("generate", "x"), ("chat",), ("plugins",)])
def test_the_command_line_ends_in_one_line(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    fake_gpus(monkeypatch, 2)
    done = CliRunner().invoke(main, [*command, "--plugins", "", "--set", "engine.device=cuda:7"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        "engine.device is 'cuda:7', but torch sees 2 GPUs: take cuda:0 to cuda:1, or set engine.device to 'cpu'\n"
    )


def test_the_command_line_as_a_process(tmp_path: Path) -> None:
    """With or without a GPU: this index is nowhere."""
    done = subprocess.run(
        [sys.executable, "-m", "mini_infer", "generate", "x", "--plugins", "", "--set", "engine.device=cuda:99"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, ""), done
    (line,) = done.stderr.splitlines()
    assert line.startswith("engine.device is 'cuda:99', but ") and line.endswith(", or set engine.device to 'cpu'")


# -- in the midst of serving -------------------------------------------------------------------------------------------

both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
DEATH = (
    "the device failed: CUDA error: an illegal memory access was encountered: start again; should it come back, "
    "CUDA_LAUNCH_BLOCKING=1 tells which kernel it was"
)


class Faulty(ReferenceSampler):
    """Raises in its ``at``-th call, and in each later one."""

    def __init__(self, at: int, error: Exception, *, once: bool = False) -> None:
        self.calls, self.at, self.error, self.once = 0, at, error, once

    def greedy(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == self.at or (self.calls > self.at and not self.once):
            raise self.error
        return super().greedy(*args)


def faulty(at: int, error: Exception, *, once: bool = False) -> Any:
    return answering("sampler", Faulty(at, error, once=once))


def request(index: int) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return EngineRequest(request_id=f"r{index}", prompt_token_ids=[index, 1, 2], params=params)


def lost(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """Let the device answer so when it is asked."""

    def synchronize(device: Any = None) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)


@both_loops
@pytest.mark.parametrize("at", [1, 4])
def test_a_device_fault_is_the_engines_death(at: int, overlap: bool) -> None:
    engine = make_engine("toy", plugins=[faulty(at, torch.AcceleratorError(ILLEGAL))], overlap=overlap).engine
    with pytest.raises(DeviceError) as error:
        run_engine(engine, [request(0), request(1)])
    assert str(error.value) == DEATH


@both_loops
def test_a_launch_on_a_lost_device_is_the_same(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lost(monkeypatch, torch.AcceleratorError(ILLEGAL))
    plugins = [faulty(2, RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))]
    engine = make_engine("toy", plugins=plugins, overlap=overlap).engine
    with pytest.raises(DeviceError) as error:
        run_engine(engine, [request(0)])
    assert str(error.value) == DEATH


@both_loops
@pytest.mark.parametrize(
    "error", [RuntimeError("Triton Error [CUDA]: invalid argument"), torch.OutOfMemoryError("CUDA out of memory.")]
)
def test_a_launch_that_was_wrong_is_the_requests_fault(
    error: Exception, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost(monkeypatch, None)
    engine = make_engine("toy", plugins=[faulty(2, error, once=True)], overlap=overlap).engine
    assert all(len(output.token_ids) == 6 for output in run_engine(engine, [request(0), request(1)]).values())
    engine = make_engine("toy", plugins=[faulty(2, error)], overlap=overlap).engine
    for output in run_engine(engine, [request(0), request(1)]).values():
        assert output.finish_reason == "error" and output.error == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("streamed", [False, True])
def test_every_open_request_hears_of_it(streamed: bool) -> None:
    llm = make_llm(tiny_model("toy"), plugins=[faulty(3, torch.AcceleratorError(ILLEGAL))])
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    stream = llm.stream([1, 2], params)
    next(stream)
    with pytest.raises(EngineError) as error:
        list(stream) if streamed else llm.generate([[1], [2, 3]], params)
    assert str(error.value) == DEATH
    with pytest.raises(EngineError, match=r"the device failed: CUDA error"):
        llm.generate([[1]], params) if streamed else list(stream)
    assert not isinstance(error.value, ConfigError | RequestError)
