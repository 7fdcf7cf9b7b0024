"""The end of background tasks."""

import asyncio

from gputile.concurrency.tasks import cancel_all


async def test_all_tasks_have_ended_whatever_they_do_on_their_way_out() -> None:
    ended: list[str] = []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)
            if name == "fails":
                raise RuntimeError(name)

    tasks = [asyncio.create_task(work(name)) for name in ("closes", "fails")]
    await asyncio.sleep(0)
    await cancel_all(task for task in tasks)
    assert ended == ["closes", "fails"]
