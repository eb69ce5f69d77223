"""A promise is admission's forecast for one sequence, with its tenant's payment for it."""

from dataclasses import dataclass, field

from admission.share import Account


@dataclass(slots=True, eq=False)
class Promise:
    """The account of one admitted sequence. Admission makes it; the ledger alone writes it, until the sequence's last
    step.
    """

    first_token: float | None = None  # seconds from arrival, the ninetieth percentile; None: no deadline and no target
    last_token: float | None = None  # the same for the last token
    prepaid: float = 0.0  # engine seconds not used yet
    charged: float = 0.0  # engine seconds, to its tenant for completed steps
    account: Account = field(init=False, repr=False, compare=False)  # set at admission
