#!/usr/bin/env bash
# Open WebUI on http://127.0.0.1:8080, for a gateway at $OPENAI_BASE_URL with the key $OPENAI_API_KEY. A key for each person or
# team, added in its settings under Connections, keeps their limits apart.
set -euo pipefail

export OPENAI_API_BASE_URL=${OPENAI_BASE_URL:?} OPENAI_API_KEY=${OPENAI_API_KEY:?}
export ENABLE_OLLAMA_API=false
export TASK_MODEL_EXTERNAL=${SLUICE_MODEL:-embedded} # titles and tags are written by the model that answers
exec open-webui serve --host 127.0.0.1 --port "${PORT:-8080}"
