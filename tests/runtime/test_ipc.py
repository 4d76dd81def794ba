"""The pipe between the node and the device: whole messages, in order, without ever blocking the device."""

from __future__ import annotations

import asyncio

from runtime.ipc import DeviceEnd, Made, NodeEnd, Order, Quit, State, pair
from store.contract.wire import Delta


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
