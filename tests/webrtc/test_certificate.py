"""A daemon that speaks https: its certificate fits the names a phone would use, and is a new one at every start."""

from __future__ import annotations

import asyncio
import socket
import ssl
from urllib.parse import urlsplit

import aiohttp
import pytest

from duplexd.bench.daemon import Daemon
from duplexd.webrtc.certificate import self_signed


async def presented(context: ssl.SSLContext) -> str:
    """The certificate, PEM, that a server with this context shows."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        address = server.sockets[0].getsockname()
        return await asyncio.to_thread(ssl.get_server_certificate, address)


def trusting(pem: str) -> ssl.SSLContext:
    """A client that trusts this one certificate; it is no authority's, so rules for those are not asked for."""
    context = ssl.create_default_context(cadata=pem)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


async def trusts(pem: str, context: ssl.SSLContext, name: str) -> bool:
    """Whether a client that trusts this certificate accepts the server under that name."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        address = server.sockets[0].getsockname()
        try:
            _, writer = await asyncio.open_connection(*address, ssl=trusting(pem), server_hostname=name)
        except ssl.SSLCertVerificationError:
            return False
        writer.close()
        return True


@pytest.mark.parametrize(
    ("host", "name", "fits"),
    [
        ("0.0.0.0", "localhost", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("0.0.0.0", socket.gethostname(), True),
        ("192.0.2.7", "192.0.2.7", True),
        ("192.0.2.7", "192.0.2.8", False),
        ("0.0.0.0", "example.org", False),
    ],
)
def test_the_certificate_names_this_machine_and_no_other(host: str, name: str, fits: bool) -> None:
    async def story() -> bool:
        context = self_signed(host)
        return await trusts(await presented(context), context, name)

    assert asyncio.run(story()) is fits


def test_each_start_has_a_key_of_its_own() -> None:
    async def story() -> tuple[str, str]:
        return await presented(self_signed("0.0.0.0")), await presented(self_signed("0.0.0.0"))

    first, second = asyncio.run(story())

    assert first != second


@pytest.mark.slow
def test_a_daemon_with_tls_serves_the_page_by_https_and_by_nothing_else() -> None:
    async def story() -> tuple[str, int, str, bool]:
        async with Daemon("--model", "clock", "--tls") as daemon, aiohttp.ClientSession() as http:
            port = urlsplit(daemon.url).port
            assert port is not None
            pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
            async with http.get(daemon.url, ssl=trusting(pem)) as answer:
                status, page = answer.status, await answer.text()
            try:
                async with http.get(f"http://127.0.0.1:{port}/"):
                    plain = True
            except aiohttp.ClientError:
                plain = False
            return daemon.url, status, page, plain

    url, status, page, plain = asyncio.run(story())

    assert url.startswith("https://localhost:")
    assert status == 200
    assert "<title>" in page
    assert not plain
