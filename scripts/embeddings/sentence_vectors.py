"""sentence-transformers' vectors of texts, by the folder and the files named: texts as JSON, vectors as numpy's."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

folder, texts, vectors = sys.argv[1:]
torch.set_num_threads(1)
model = SentenceTransformer(folder, device="cpu")
read = json.loads(Path(texts).read_text())
model.encode(read[:2])  # what the first call makes ready
before = time.process_time()
np.save(vectors, model.encode(read, batch_size=32))
print(json.dumps({"cpu_s": time.process_time() - before}))
