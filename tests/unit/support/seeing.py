"""A program in place of ``tests.harness.worker.main``: it answers with its device and the GPUs that it may see."""

import json
import os
import sys

from tests.harness.device.gpus import VISIBLE

for _ in sys.stdin:
    print(json.dumps({"told": [sys.argv[1], os.environ.get(VISIBLE)], "fatal": False}), flush=True)
