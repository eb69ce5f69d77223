from tests.backend.paper_device import continuation
from tests.backend.scheduler.bench import END
from tests.backend.stepped_engine import Bench, running


async def test_a_consumer_that_wants_the_whole_is_woken_for_the_first_and_the_last_token() -> None:
    async with running(Bench()) as bench:
        bench.executor.free()
        with bench.admission.admit(bench.request(max_tokens=20)) as stream:
            stream.eager = False
            parts = [await stream.take()]
            while stream.finish_reason is None:
                parts.append(await stream.take())
        assert len(parts) <= 2
        assert [token for part in parts for token in part] == continuation([5, 6, 7], 20, END)
