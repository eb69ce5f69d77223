"""The floor that an endpoint picker is measured against: grpc.aio answering each exchange with one endpoint."""

import asyncio
import json
import sys
from typing import Any

import grpc
import uvloop

from fleet.ext_proc.exchange import DESTINATION, OVERWRITE
from fleet.ext_proc.messages import KIND, ProcessingRequest, ProcessingResponse
from fleet.ext_proc.server import EXT_PROC

ENDPOINT = b"127.0.0.1:8000"


async def process(_: object, context: Any) -> None:
    header = {"header": {"key": DESTINATION, "raw_value": ENDPOINT}, "append_action": OVERWRITE}
    head = ProcessingResponse(request_headers={"response": {"header_mutation": {"set_headers": [header]}}})
    while (message := await context.read()) is not grpc.aio.EOF:
        kind = message.WhichOneof(KIND)
        if kind in {"request_body", "response_body"}:
            part = getattr(message, kind)
            if kind == "request_body":
                await context.write(head)
            piece = {"body": part.body, "end_of_stream": part.end_of_stream}
            mutation = {"response": {"body_mutation": {"streamed_response": piece}}}
            await context.write(ProcessingResponse(**{kind: mutation}))
        elif kind == "response_headers":
            await context.write(ProcessingResponse(response_headers={}))


async def serve() -> None:
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(
        process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
    )
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(EXT_PROC, {"Process": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"port": port}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(serve())
