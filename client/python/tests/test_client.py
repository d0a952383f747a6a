import unittest
from concurrent import futures

import coppice
import grpc
from coppice.v1 import inference_pb2, inference_pb2_grpc


def delta(offset, ids, text, seed=None, final=False):
    out = inference_pb2.GenerateDelta(request_id="r1", token_offset=offset, token_ids=ids, text=text)
    if seed is not None:
        out.seed = seed
    if final:
        out.final.finish_reason = 2
    return out


class FakeRouter(inference_pb2_grpc.InferenceServicer):
    """Plays one script per call: deltas, then an error's code or None."""

    def __init__(self, scripts=()):
        self.scripts, self.requests = list(scripts), []
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def Generate(self, request, context):
        self.requests.append(request)
        deltas, code = self.scripts.pop(0)
        yield from deltas
        if code is not None:
            context.abort(code, "as the script says")

    def Tokenize(self, request, context):
        return inference_pb2.TokenizeResponse(ids=request.text.encode())


UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class ClientTest(unittest.TestCase):
    def client(self, *routers):
        for router in routers:
            self.addCleanup(router.server.stop, None)
        return coppice.Client([r.address for r in routers], first_backoff=0.001, max_backoff=0.005,
                              attempts_to_resume=4)

    def request(self):
        return inference_pb2.GenerateRequest(text="hello", max_tokens=4)

    def test_resumes_on_the_next_router(self):
        first = FakeRouter([([delta(0, [1, 2], "ab", seed=9)], UNAVAILABLE)])
        second = FakeRouter([([delta(0, [1, 2], "ab"), delta(2, [3], "c"), delta(3, [4], "d", final=True)], None)])
        done = self.client(first, second).generate(self.request())
        self.assertEqual((done.text, done.token_ids, done.seed, done.resumes), ("abcd", [1, 2, 3, 4], 9, 1))
        self.assertEqual(second.requests[0].resume.seed, 9)
        self.assertEqual(list(second.requests[0].resume.token_ids), [1, 2])
        self.assertEqual(second.requests[0].text, "hello")

    def test_a_torn_stream_is_resumed(self):
        router = FakeRouter([([delta(0, [1], "a", seed=9)], None), ([delta(2, [3], "c")], None),
                             ([delta(1, [2], "b"), delta(2, [], "", final=True)], None)])
        self.assertEqual(self.client(router).generate(self.request()).text, "ab")

    def test_gives_up(self):
        router = FakeRouter([([delta(0, [1], "a", seed=9)], UNAVAILABLE)] + [([], UNAVAILABLE)] * 20)
        with self.assertRaises(grpc.RpcError) as raised:
            self.client(router).generate(self.request())
        self.assertEqual(raised.exception.code(), UNAVAILABLE)
        self.assertEqual(len(router.requests), 4)

    def test_other_errors_are_not_retried(self):
        router = FakeRouter([([], grpc.StatusCode.INVALID_ARGUMENT)])
        with self.assertRaises(grpc.RpcError) as raised:
            self.client(router).generate(self.request())
        self.assertEqual(raised.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertEqual(len(router.requests), 1)

    def test_unary(self):
        self.assertEqual(self.client(FakeRouter()).tokenize("ab"), [97, 98])


if __name__ == "__main__":
    unittest.main()
