"""Continues a prompt: python3 example.py HOST:PORT[,HOST:PORT…] PROMPT"""
import sys

import coppice
from coppice.v1 import inference_pb2

routers, prompt = sys.argv[1].split(","), sys.argv[2]
with coppice.Client(routers) as client:
    done = coppice.Completion()
    for delta in client.stream(inference_pb2.GenerateRequest(text=prompt, max_tokens=64), done):
        print(delta.text, end="", flush=True)
    print(f"\n[{len(done.token_ids)} tokens, "
          f"acceptance length {done.final.speculation.acceptance_length:.2f}]")
