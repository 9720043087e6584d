"""A gateway for chat completions: places each request with the router, and streams the engine's response through.

usage: gateway.py PORT ENGINE_URL [ENGINE_URL ...]

The engines are probed for their configuration and KV events. vLLM before 0.31 does not report its event endpoints: a file
for ``discovery.WatchedFile`` names them. Needs the package ``aiohttp``. Prompts are tokenized by the engine at ``/tokenize``; a
gateway with a local tokenizer saves this request.
"""

import sys

import aiohttp
from aiohttp import web

from pointsman import Router, discovery, errors

CLIENT = web.AppKey("CLIENT", aiohttp.ClientSession)
HOP_BY_HOP = {"connection", "content-length", "keep-alive", "transfer-encoding"}


def application(router: Router, tokenizer_url: str) -> web.Application:
    async def client(app):
        async with aiohttp.ClientSession() as app[CLIENT], router:
            yield

    async def tokenize(app, body):
        prompt = {"messages": body["messages"]} if "messages" in body else {"prompt": body["prompt"]}
        async with app[CLIENT].post(f"{tokenizer_url}/tokenize", json={"model": body.get("model"), **prompt}) as found:
            found.raise_for_status()
            return (await found.json())["tokens"]

    async def complete(request):
        body = await request.json()
        try:
            placement = await router.route(await tokenize(request.app, body))
        except errors.RouteError as error:
            return web.json_response({"error": {"message": str(error), "type": error.reason}}, status=error.http_status)
        async with placement:
            rank = placement.rank_at_worker
            headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
            url = placement.endpoint + request.path
            try:
                async with request.app[CLIENT].post(url, json=body, headers=headers) as found:
                    kept = {name: value for name, value in found.headers.items() if name.lower() not in HOP_BY_HOP}
                    response = web.StreamResponse(status=found.status, headers=kept)
                    await response.prepare(request)
                    reader = router.follow(placement, found.content_type)
                    async for chunk in found.content.iter_any():
                        reader.read(chunk)
                        await response.write(chunk)
                    reader.end()
                    placement.outcome("server_error" if found.status >= 500 else "ok")
                    await response.write_eof()
                    return response
            except aiohttp.ClientConnectorError as error:
                placement.outcome("connect_failed")
                return web.json_response({"error": {"message": str(error), "type": "connect_failed"}}, status=502)

    app = web.Application()
    app.cleanup_ctx.append(client)
    app.add_routes([web.post("/v1/chat/completions", complete), web.post("/v1/completions", complete)])
    return app


def main(port, *urls):
    fleet = Router(min_initial_workers=len(urls), discovery=[discovery.ProbedUrls(urls)])
    try:
        web.run_app(application(fleet, urls[0]), host="127.0.0.1", port=int(port))
    except errors.PointsmanError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        print(next(line for line in __doc__.splitlines() if line.startswith("usage: ")), file=sys.stderr)
        sys.exit(2)
    main(*sys.argv[1:])
