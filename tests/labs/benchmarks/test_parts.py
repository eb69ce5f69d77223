from labs.benchmarks.parts import PartSampler


def test_every_marker_is_a_function_of_the_gateway() -> None:
    PartSampler()
