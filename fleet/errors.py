"""The refusals and failures that only a router sends; all others are those of `gateway.errors`.

ApiError
├── ReplicaNotFound      404  on the admin port
├── NoReplica            503  no replica can be reached that takes new requests
└── ReplicaLost          503  before the first byte; an error event after it
"""

from admission.outcome import Outcome
from gateway.errors import ApiError


class ReplicaNotFound(ApiError):
    status = 404
    code = "replica_not_found"


class NoReplica(ApiError):
    status = 503
    type = "service_unavailable_error"
    code = "no_replica"
    outcome = Outcome.REFUSED
    dropped_reason = "no_replica"
    should_retry = True

    def __init__(self) -> None:
        super().__init__("No replica takes requests at the moment. Send the request again.", retry_after=1)


class ReplicaLost(ApiError):
    status = 503
    type = "service_unavailable_error"
    code = "replica_lost"
    outcome = Outcome.FAILED
    dropped_reason = "replica_lost"
    should_retry = True

    def __init__(self) -> None:
        super().__init__("The replica that served this request was lost. Send the request again.", retry_after=1)
