from dataclasses import replace

from admission.length_predictor import features_of

from backend.sampling_params import SamplingParams
from gateway.api.engine_request import ClientDeadlines, EngineRequest

ASKED = EngineRequest(
    id="r",
    tenant="acme",
    key="k1",
    prompts=[[1, 2], [3]],
    max_tokens=[5, 5],
    sampling=SamplingParams(),
    service_tier=None,
    service_class="interactive",
    priority_class=0,
    token_interval=None,
    first_token_target=None,
    first_token_by=None,
    done_by=None,
    deadlines=ClientDeadlines(),
    body_bytes=1,
    form=(11, 12),
)


def traits(request: EngineRequest) -> set[tuple[int, ...]]:
    return {sequence.traits for sequence in request.sequences(frozenset(), int)}


def test_lengths_are_predicted_by_key_and_form_too() -> None:
    (first,), (other_key,), (other_form,) = map(traits, (ASKED, replace(ASKED, key="k2"), replace(ASKED, form=(11,))))
    assert first[1:] == other_key[1:] == (11, 12) and first[0] != other_key[0]
    assert other_form == first[:2]
    features = [features_of("acme", [1, 2], 5, one) for one in (first, other_key, other_form)]
    assert len(set(features)) == 3
