"""A trainer that pulls: results in the order in which sessions end, each dealt with once, whatever is killed when.

POLAR_TOKEN=... python examples/trainer_pull.py http://127.0.0.1:8080 my-trainer results.jsonl
"""

import json
import os
import sys
import urllib.request
from pathlib import Path


def ask(url, body=None):
    headers = {"Authorization": f"Bearer {os.environ['POLAR_TOKEN']}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as reply:
        return json.load(reply)


def pull(server, consumer, path):
    have = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    seen = {(result["session_id"], result["attempt"]) for result in have}
    while True:
        page = ask(f"{server}/results?consumer={consumer}&limit=16&wait=20")  # whole results, with their traces
        new = [each["result"] for each in page["results"]]
        new = [result for result in new if (result["session_id"], result["attempt"]) not in seen]
        if new:  # train here; what counts is that it is kept before it is acknowledged
            whole = path.with_suffix(".part")
            have, seen = have + new, seen | {(result["session_id"], result["attempt"]) for result in new}
            whole.write_text("".join(json.dumps(result) + "\n" for result in have))
            whole.replace(path)
        if page["results"]:
            ask(f"{server}/results/ack", {"consumer": consumer, "cursor": page["cursor"]})


if __name__ == "__main__":
    pull(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
