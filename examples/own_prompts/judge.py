"""An endpoint for `reward.http`: a POST of JSON with prompt, response, fields and job is answered {"reward": NUMBER}.

    python judge.py [PORT]

What runs here may be anything: a reward model, a sandbox, a judge. It is asked again after 5xx, 429 and silence.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JudgeHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        right = str(asked["fields"]["answer"]) in asked["response"]
        answer = json.dumps({"reward": 1.0 if right else 0.0}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


if __name__ == "__main__":
    port = int(sys.argv[1]) if sys.argv[1:] else 8000
    ThreadingHTTPServer(("", port), JudgeHandler).serve_forever()
