"""What must hold of any session, checked against the toy engine's own log."""

from __future__ import annotations

import numpy as np

from polar.capture.graph import SessionGraph
from polar.contract.arrays import from_json, to_json
from polar.contract.completion import Completion
from polar.contract.result import Reconstruction, Trace
from polar.trajectories.base import Built
from polar.trajectories.session import is_trainable

from .toy import Generation, ToyGateway


def check_session(gateway: ToyGateway, built: Built) -> None:
    """Every trained token stands where the engine sampled it, and every completion is accounted for."""
    for trace in built.traces:
        check_trace(gateway, trace)
    check_accounts(gateway.completions(), built)


def check_trace(gateway: ToyGateway, trace: Trace) -> None:
    length = len(trace.response_ids)
    assert len(trace.loss_mask) == len(trace.response_logprobs) == len(trace.weight_versions) == length
    assert trace.loss_mask[-1] == 1, "a trace ends in a trained token"
    assert trace.loss_mask[0] == 1, "everything before the first trained token is prompt"
    full = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
    expected_mask = np.zeros(length, dtype=np.int32)
    for index, name in enumerate(trace.completion_ids):
        generation = gateway.log[name]
        start = len(generation.context)
        if trace.metadata["context_exact"]:
            assert tuple(full[:start]) == generation.context, "the engine had another context"
        else:
            start = len(trace.prompt_ids) + trace.metadata["replies"][index][1]
            if index:
                _check_spliced(gateway, trace, index, full)
        at = start - len(trace.prompt_ids)
        assert at >= 0
        _check_reply(trace, generation, at)
        expected_mask[at : at + len(generation.sampled)] = 1
        message, begin, end = trace.metadata["replies"][index]
        assert (begin, end) == (at, at + len(generation.sampled))
        assert trace.response_messages[message] == generation.conversation[-1]
    assert trace.loss_mask.tolist() == expected_mask.tolist()
    context = trace.loss_mask == 0
    assert not trace.response_logprobs[context].any()
    assert (trace.weight_versions[context] == -1).all()
    last = gateway.log[trace.completion_ids[-1]]
    assert trace.prompt_messages + trace.response_messages == last.conversation


def _check_spliced(gateway: ToyGateway, trace: Trace, index: int, full: list[int]) -> None:
    """Between two replies stands what the engine had after the end of the first one."""
    replies = trace.metadata["replies"]
    offset = len(trace.prompt_ids)
    between = full[offset + replies[index - 1][2] : offset + replies[index][1]]
    context = gateway.log[trace.completion_ids[index]].context
    assert list(context[-len(between) :]) == between
    assert context[-len(between) - 1] == gateway.log[trace.completion_ids[index - 1]].sampled[-1]


def _check_reply(trace: Trace, generation: Generation, at: int) -> None:
    end = at + len(generation.sampled)
    assert tuple(trace.response_ids[at:end].tolist()) == generation.sampled
    assert tuple(trace.response_logprobs[at:end].tolist()) == generation.logprobs
    assert set(trace.weight_versions[at:end].tolist()) == {int(generation.version)}


def check_accounts(completions: list[Completion], built: Built) -> None:
    report: Reconstruction = built.reconstruction
    placed = [name for names in report.completions.values() for name in names]
    assert sorted(placed) == sorted(c.completion_id for c in completions), "each under exactly one fate"
    in_traces = [name for trace in built.traces for name in trace.completion_ids]
    assert len(in_traces) == len(set(in_traces)), "trained twice"
    told = report.completions.get("trained", []) + report.completions.get("auxiliary", [])
    assert sorted(in_traces) == sorted(told)
    sampled = {c.completion_id: len(c.response_ids) for c in completions}
    masked = sum(int(trace.loss_mask.sum()) for trace in built.traces)
    assert report.tokens_trained == masked == sum(sampled[name] for name in in_traces)
    assert {c.completion_id for c in completions if is_trainable(c)} == set(in_traces) | set(
        report.completions.get("excluded_role", [])
    )
    assert [split.completion_id for split in report.splits] == [t.completion_ids[0] for t in built.traces[1:]]


def check_splits_are_needed(gateway: ToyGateway, built: Built) -> None:
    """A trace ends only where the next context is not its tokens and more, or where another trace goes on."""
    roles = {name: trace.role for trace in built.traces for name in trace.completion_ids}
    following = {
        later: earlier
        for trace in built.traces
        for earlier, later in zip(trace.completion_ids, trace.completion_ids[1:], strict=False)
    }
    reasons = {split.completion_id: split.reason for split in built.reconstruction.splits}
    for trace in built.traces[1:]:
        begin = trace.completion_ids[0]
        completion = gateway.graph.get(begin)
        assert completion is not None
        parent = completion.parent_id
        if parent not in roles or roles[parent] != trace.role:
            continue
        before = gateway.log[parent].context + gateway.log[parent].sampled
        exact = gateway.log[begin].context[: len(before)] == before
        assert exact == (reasons[begin] == "fork")
        if exact:
            assert parent in following.values(), "its place is taken by another trace"


def check_storage(gateway: ToyGateway) -> None:
    """What is stored gives back what was said, also after a restart; and no token is stored twice in a chain."""
    stored = [from_json(to_json(c), Completion) for c in gateway.completions()]
    for graph in (gateway.graph, SessionGraph(sorted(stored, key=lambda c: c.seq))):
        for completion in graph.completions():
            generation = gateway.log[completion.completion_id]
            assert tuple(graph.prompt_ids(completion).tolist()) == generation.context
            assert tuple(graph.conversation(completion)) == generation.conversation
            assert completion.prompt_len == len(generation.context)
            both = generation.context + tuple(completion.response_ids.tolist())
            assert tuple(graph.ids(completion.completion_id).tolist()) == both
            if completion.parent_id is not None and completion.split is None:
                parent = graph.get(completion.parent_id)
                assert parent is not None
                assert len(completion.prompt_delta) == len(generation.context) - parent.total_len
