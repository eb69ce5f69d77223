#!/usr/bin/env bash
# Claude Code, for a gateway at $ANTHROPIC_BASE_URL with the key $ANTHROPIC_API_KEY and the model $SLUICE_MODEL. Its context has to
# hold what Claude Code says of its tools, tens of thousands of tokens; -p --system-prompt "Be brief." --tools "" tries it without.
set -euo pipefail

export ANTHROPIC_BASE_URL=${ANTHROPIC_BASE_URL:?} ANTHROPIC_AUTH_TOKEN=${ANTHROPIC_API_KEY:?} ANTHROPIC_MODEL=${SLUICE_MODEL:?}
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
unset ANTHROPIC_API_KEY
exec claude "$@"
