"""Who reads the calendar, which may jump. What waits, times out, expires or refills counts monotonic time."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CALENDAR = re.compile(r"\btime\.time(_ns)?\b|\bfrom time import|\bdatetime\.(now|today|utcnow)\b|\bdate\.today\b")
READERS = {
    "fleet/admin/api.py": "moments for people",
    "fleet/ext_proc/endpoint.py": "a deadline may be given as a moment",
    "backend/adapter_registry.py": "created, in the list of models",
    "backend/kernels/build.py": "files have the calendar's time",
    "backend/text/chat_template.py": "a template may ask for the date",
    "gateway/admin/api.py": "moments for people",
    "gateway/admin/bill.py": "what was used on a day",
    "gateway/api/conversations.py": "created, in a conversation",
    "gateway/admin/audit_log.py": "moments for people",
    "gateway/admin/admins.py": "moments for people",
    "gateway/admin/plane.py": "a search of ended requests names moments",
    "gateway/admin/policy_editor.py": "moments for people",
    "gateway/admin/request_database.py": "ended requests are kept for days, over restarts",
    "gateway/ids.py": "ids begin with their second, for indexes alone",
    "gateway/batches/endpoints.py": "files and batches are made, and expire, on a date",
    "gateway/batches/objects.py": "files and batches are made, and expire, on a date",
    "gateway/batches/records.py": "files and batches are made, and expire, on a date",
    "gateway/batches/runner.py": "a batch expires on a date",
    "gateway/cli/audit.py": "moments for people",
    "gateway/admin/keys.py": "a key is made, and expires, on a date",
    "gateway/admin/usage.py": "what was used on a day",
    "gateway/admin/what_if.py": "budgets are of days, and requests came on one",
    "gateway/cli/arguments.py": "a command's dates",
    "gateway/core.py": "an event log tells on which day it began, since budgets are of days",
    "gateway/app.py": "created, in the list of models",
    "gateway/tenants/auth.py": "a key expires on a date",
    "gateway/doctor/file_checks.py": "a certificate expires on a date",
    "gateway/doctor/machine_checks.py": "the clock itself is checked",
    "gateway/doctor/store_checks.py": "the clocks of two machines are compared",
    "gateway/api/endpoints.py": "the moment of a load, as SGLang's router reads it",
    "gateway/api/generation.py": "a deadline may be given as a moment",
    "gateway/cli/keys.py": "a command's dates",
    "gateway/tenants/alert_sender.py": "a receiver compares the moment of a signature with its own clock",
    "gateway/tenants/live_policy.py": "moments for people",
    "gateway/cli/policy.py": "a budget resets on a date",
    "gateway/openai/replies.py": "created, in an answer",
    "gateway/openai/response_events.py": "created and completed, in a response",
    "gateway/openai/embeddings.py": "created, in an answer",
    "gateway/encoders.py": "created, in the list of models",
    "gateway/api/encoding_endpoints.py": "a deadline may be given as a moment",
    "gateway/telemetry/metrics/push.py": "the start of a counter, for a collector",
    "gateway/telemetry/request_record.py": "a request's beginning; every later moment is counted from it",
    "gateway/cli/usage.py": "a command's dates",
    "quotas/store/batches.py": "leases of replicas whose clocks have nothing else in common",
    "quotas/store/zone_offsets.py": "the years for which offsets of time zones are told",
    "quotas/quotas.py": "a budget resets on a date, which the client is told",
}


def test_nothing_else_reads_the_calendar() -> None:
    rooms = ("admission", "backend", "fleet", "gateway", "quotas")
    sources = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    readers = {str(path.relative_to(ROOT)) for path in sources if CALENDAR.search(path.read_text())}
    assert readers - READERS.keys() == set(), "a clock that may jump: use the engine's, or say here why not"
