import pytest

from admission.core import Overload
from labs.simulation.errors import OptionError
from labs.simulation.policy import parse_simulated_policy
from tests.labs.simulation.runs import DEVICE


def test_an_ordering_alone_is_a_policy() -> None:
    policy = parse_simulated_policy("fcfs", DEVICE)
    assert policy.core.order == "fcfs" and policy.name == "fcfs"
    assert policy.engine.num_blocks * policy.engine.block_size == DEVICE.kv_tokens


def test_settings_of_the_core_and_of_the_engine_go_where_they_belong() -> None:
    policy = parse_simulated_policy("fair,overload=bounded,confidence=0.5,weights=gold:4+a:b:2,prefill_chunk=off,"
                                    "kv_tokens=512,max_num_batched_tokens=512", DEVICE)  # fmt: skip
    assert policy.core.overload is Overload.BOUNDED and policy.core.confidence == 0.5
    assert policy.core.weights == {"gold": 4.0, "a:b": 2.0}
    assert policy.engine.prefill_chunk is None and policy.engine.num_blocks == 32 and policy.engine.max_model_len == 512


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("confidense=1", "there is no setting confidense: did you mean confidence?"),
        ("kv_memory_bytes=2GiB", "kv_memory_bytes is called kv_tokens"),
        ("num_host_blocks=100", "num_host_blocks needs block_copy_seconds"),
        ("fair,order=fcfs", "order is set twice"),
        ("lottery", "must be one of fair, fcfs"),
        ("seconds_per_class=fast", "must be a number"),
        ("seconds_per_class=-1", "seconds_per_class must be above 0"),
        ("max_num_seqs=1.5", "must be a whole number"),
        ("max_num_seqs=4096", "max_num_seqs 4096 exceeds max_num_batched_tokens"),
        ("weights=gold", "write TENANT:WEIGHT"),
        ("kv_tokens=much", "must be a whole number"),
    ],
)
def test_a_policy_that_makes_no_sense_names_the_option_and_the_setting(text: str, message: str) -> None:
    with pytest.raises(OptionError) as error:
        parse_simulated_policy(text, DEVICE, "--compare")
    assert str(error.value).startswith("--compare: ") and message in str(error.value)
