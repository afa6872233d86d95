"""A trainer that is called: each task with callback_url is posted here when all its sessions have ended.

POLAR_CALLBACK_SECRET=... python examples/trainer_callback.py 9000 deliveries/
"""

import base64
import hashlib
import hmac
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SECRET = os.environ["POLAR_CALLBACK_SECRET"]  # the one of polar serve
KEY = base64.b64decode(SECRET[6:]) if SECRET.startswith("whsec_") else SECRET.encode()


def genuine(headers, body):
    """Signed with our secret, and not a delivery of long ago that somebody sends again."""
    stamp = headers.get("webhook-timestamp", "")
    if not stamp.isdigit() or abs(time.time() - int(stamp)) > 300:
        return False
    signed = f"{headers.get('webhook-id', '')}.{stamp}.".encode() + body
    wanted = "v1," + base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
    return any(hmac.compare_digest(wanted, given) for given in headers.get("webhook-signature", "").split())


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if not genuine(self.headers, body):
            self.send_error(401)
            return
        path = folder / f"{self.headers['webhook-id']}.json"  # the same id at every try: it is taken once
        if not path.exists():
            part = path.with_suffix(f".{time.monotonic_ns()}.part")
            part.write_bytes(body)  # {"task_id", "status", "results": [...], "delivery_id"}
            part.replace(path)
        self.send_response(204)
        self.end_headers()


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
