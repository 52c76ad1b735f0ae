"""A step's answer comes when the device has reached the step's end, and says no more than that step did."""

from types import SimpleNamespace

import pytest
import torch

from mini_infer.errors import PluginError
from mini_infer.interfaces import BlockRef, Copy, KVCacheSpec, SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.reference.attention import ReferenceAttention
from mini_infer.testing import make_engine, run_engine
from mini_infer.testing.toy_model import ToyForCausalLM
from mini_infer.worker import host_copy
from mini_infer.worker.answer import PendingStep
from mini_infer.worker.host_copy import HostCopy
from mini_infer.worker.kv_store import KVStore


def store() -> KVStore:
    backend = ReferenceAttention(KVCacheSpec("full", 1, 2, 2, "float32"), "cpu", 4)
    return KVStore([backend], [torch.float32], 4, {"host": 4}, "cpu")


def copy(copy_id: int) -> Copy:
    return Copy(copy_id, BlockRef("device", copy_id), BlockRef("host", copy_id), 0)


def test_copies_of_the_next_step_are_not_reported_with_this_one() -> None:
    kv = store()
    kv.run([copy(1)], step_id=7)
    kv.run([copy(2), copy(3)], step_id=8)  # launched before the answer of step 7 is read
    assert PendingStep(7, None, kv, "cpu").result().copies_done == [1]
    assert PendingStep(8, None, kv, "cpu").result().copies_done == [2, 3]
    assert PendingStep(9, None, kv, "cpu").result().copies_done == []


def test_copies_of_a_step_without_an_answer_are_reported_with_the_next() -> None:
    kv = store()
    kv.run([copy(1)], step_id=7)
    kv.run([copy(2)], step_id=8)
    assert PendingStep(8, None, kv, "cpu").result().copies_done == [1, 2]


def test_a_step_that_draws_nothing_is_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("wait")

    monkeypatch.setattr(host_copy, "torch", SimpleNamespace(cuda=SimpleNamespace(Event=Event)))
    pending = PendingStep(1, None, store(), "cuda:0")
    assert done == ["record"]
    pending.result()
    assert done == ["record", "wait"]


@pytest.mark.gpu
def test_the_device_has_reached_the_end() -> None:
    torch.cuda._sleep(100_000_000)
    assert not torch.cuda.current_stream().query()
    HostCopy([], "cuda").wait()
    assert torch.cuda.current_stream().query()


def test_a_model_that_leaves_nothing_out_of_its_last_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row's output would be a token of the first."""
    monkeypatch.setattr(ToyForCausalLM, "leaves_out", True)
    engine = make_engine("toy").engine
    params = SamplingParams(max_tokens=2)
    requests = [EngineRequest(request_id=str(n), prompt_token_ids=[1] * n, params=params, seed=0) for n in (2, 3)]
    with pytest.raises(PluginError, match=r"ToyForCausalLM gave 5 outputs .* of 2 rows: .* StepShape\.last_only"):
        run_engine(engine, requests)
