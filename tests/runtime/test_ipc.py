"""The pipe between the node and the device: whole messages, in order, without ever blocking the device."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from runtime.ipc import DeviceEnd, Made, NodeEnd, Order, Quit, State, StateChange, pair
from store.contract.wire import Delta, ModelState, Residency

STATES = st.builds(ModelState, residency=st.sampled_from(Residency), tokens=st.integers(0, 1))


async def test_messages_arrive_whole_and_in_order_both_ways() -> None:
    ours, theirs = pair()
    device, node = DeviceEnd(theirs), await NodeEnd.open(ours)
    for awake in (True, False):
        node.send(Order("m" * 100_000, awake))
    node.send(Quit())
    received: list[object] = []
    while len(received) < 3:
        device.wait(1.0)
        received += device.receive()
        await asyncio.sleep(0)
    assert received == [Order("m" * 100_000, True), Order("m" * 100_000, False), Quit()]

    device.send(State("a", 3, {}))
    device.send(Made({"g": [Delta(1, [2, 3], 0)]}))
    messages = node.messages()
    assert await anext(messages) == State("a", 3, {})
    assert await anext(messages) == Made({"g": [Delta(1, [2, 3], 0)]})
    node.close()
    theirs.close()


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), STATES)))
def test_of_each_state_only_changes_go_through_the_pipe_and_the_node_has_the_whole(
    states: list[dict[str, ModelState]],
) -> None:
    """A model that has not changed stays the same object at the node, which then compares states of models fast."""
    sent: dict[str, ModelState] = {}
    heard: dict[str, ModelState] = {}
    for number, models in enumerate(states):
        change = StateChange.between(sent, State(switches=number, models=models))
        assert all(sent.get(key) != model for key, model in change.state.models.items())
        whole = change.after(heard)
        assert whole == State(switches=number, models=models)
        assert all(whole.models[key] is heard[key] for key in models if models[key] == sent.get(key))
        sent, heard = models, whole.models


async def test_the_node_hears_whole_states() -> None:
    ours, theirs = pair()
    device, node = DeviceEnd(theirs), await NodeEnd.open(ours)
    cold, staged = ModelState(residency=Residency.COLD), ModelState(residency=Residency.STAGED)
    messages = node.messages()
    for models in ({"a": cold, "b": cold}, {"a": cold, "b": staged}, {"b": staged}, {"b": staged}, {}, {"a": cold}):
        device.send(State(models=models))
        assert await anext(messages) == State(models=models)
    node.close()
    theirs.close()


async def test_a_node_that_does_not_read_never_blocks_the_device_and_loses_nothing() -> None:
    ours, theirs = pair()
    device = DeviceEnd(theirs)
    frame = Made({"g": [Delta(n, list(range(1000)), 0) for n in range(100)]})
    count = 0
    while device.backlog < 20 << 20:  # far more than the kernel holds
        device.send(frame)
        count += 1
    node = await NodeEnd.open(ours)

    async def read() -> int:
        read = 0
        async for message in node.messages():
            assert message == frame
            read += 1
            if read == count:
                break
        return read

    reading = asyncio.create_task(read())
    while not reading.done():
        device.flush()
        await asyncio.sleep(0)
    assert await reading == count
    node.close()
    theirs.close()


async def test_each_end_notices_that_the_other_is_gone() -> None:
    ours, theirs = pair()
    device, node = DeviceEnd(theirs), await NodeEnd.open(ours)
    node.close()
    await asyncio.sleep(0.05)
    assert device.receive() == [] and device.closed
    theirs.close()

    ours, theirs = pair()
    node = await NodeEnd.open(ours)
    theirs.close()
    assert [message async for message in node.messages()] == []
    node.close()
