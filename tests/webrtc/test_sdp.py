"""Offers of strangers: cleaned, refused with a sentence, answered with what browsers need to be told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.errors import ConfigError, InputRefused
from duplexd.webrtc.sdp import CANDIDATES_MAX, OFFER_BYTES_MAX, check_offer, clean_offer, finish_answer, takes_vp8

VOICE = """v=0
o=- 1 2 IN IP4 127.0.0.1
s=-
t=0 0
m=audio 9 UDP/TLS/RTP/SAVPF 111 63
c=IN IP4 0.0.0.0
a=rtpmap:111 opus/48000/2
a=fmtp:111 minptime=10;useinbandfec=1
a=rtpmap:63 red/48000/2
a=sendrecv
"""
HOST = "a=candidate:1 1 udp 2122260223 192.168.1.7 51000 typ host generation 0"
MDNS = "a=candidate:2 1 udp 2122260223 0b7e2f1c-5b1e-4a3e-9d4f-1c2b3a4d5e6f.local 51001 typ host generation 0"
TCP = "a=candidate:3 1 tcp 1518280447 192.168.1.7 9 typ host tcptype active"


def test_who_publishes_is_told_what_a_publisher_needs() -> None:
    with pytest.raises(InputRefused, match="no audio section; a session needs one, sendonly or sendrecv"):
        check_offer(VOICE.replace("m=audio", "m=video"), receives=False)


def test_who_publishes_brings_one_of_each_kind() -> None:
    """A viewer's second line is answered as inactive; a publisher would think that it is heard."""
    second = VOICE + VOICE[VOICE.index("m=audio") :]
    check_offer(second)
    with pytest.raises(InputRefused, match="2 audio sections; one voice"):
        check_offer(second, receives=False)


def test_a_browser_offer_passes() -> None:
    check_offer(VOICE + HOST + "\n" + MDNS + "\n")


def test_an_offer_without_candidates_passes_unchanged() -> None:
    check_offer(VOICE)

    assert clean_offer(VOICE).splitlines() == VOICE.splitlines()


def test_candidates_that_only_cost_time_are_dropped() -> None:
    """Multicast names, TCP and the mark that would make an unreachable offer fail at once go; the rest stays."""
    offer = VOICE + "\n".join([MDNS, HOST, TCP, "a=candidate:4 1 udp", "a=end-of-candidates"]) + "\n"

    assert clean_offer(offer).splitlines() == [*VOICE.splitlines(), HOST]


def test_cleaning_twice_is_cleaning_once() -> None:
    once = clean_offer(VOICE + MDNS + "\n" + HOST)

    assert clean_offer(once) == once


@pytest.mark.parametrize(
    ("offer", "sentence"),
    [
        pytest.param(None, "not an SDP", id="nothing"),
        pytest.param(b"v=0", "not an SDP", id="bytes"),
        pytest.param("<html>", "not an SDP", id="html"),
        pytest.param("v=0\r\ns=-\r\n", "no audio section", id="no-sections"),
        pytest.param(VOICE.replace("m=audio", "m=video"), "no audio section", id="video-only"),
        pytest.param(VOICE.replace("opus", "PCMU"), "lacks opus", id="no-opus"),
        pytest.param(VOICE.replace("a=sendrecv", "a=sendonly"), "does not receive", id="deaf"),
        pytest.param(VOICE.replace("a=sendrecv", "a=inactive"), "does not receive", id="inactive"),
        pytest.param(VOICE + "m=text 9 RTP/AVP 98\n", "cannot be answered", id="text-section"),
        pytest.param(VOICE + "m=\n", "cannot be answered", id="broken-section"),
        pytest.param(VOICE + "m=audio 9 UDP/TLS/RTP/SAVPF 111\n" * 8, "9 media sections", id="many-sections"),
        pytest.param(VOICE + "m=application 9 UDP/DTLS/SCTP x\n" * 2, "more than one data", id="two-data-sections"),
        pytest.param(VOICE + (HOST + "\n") * (CANDIDATES_MAX + 1), f"{CANDIDATES_MAX + 1} candidates", id="candidates"),
        pytest.param(VOICE + "a=x\n" * OFFER_BYTES_MAX, "bytes", id="oversized"),
        pytest.param(VOICE + "ä" * (OFFER_BYTES_MAX // 2), "bytes", id="oversized-in-bytes-only"),
    ],
)
def test_what_cannot_become_a_session_is_refused_with_a_sentence(offer: object, sentence: str) -> None:
    with pytest.raises(InputRefused, match=sentence):
        check_offer(offer)


@given(st.text(max_size=400), st.integers(0, 400))
def test_no_text_makes_it_raise_anything_else(noise: str, place: int) -> None:
    offer = VOICE[:place] + noise + VOICE[place:]
    try:
        check_offer(offer)
    except InputRefused:
        return
    finish_answer(clean_offer(offer))


ANSWER = "\r\n".join(
    [
        "v=0",
        "m=audio 40000 UDP/TLS/RTP/SAVPF 96",
        "c=IN IP4 10.0.0.5",
        "a=rtpmap:96 opus/48000/2",
        "a=candidate:7 1 udp 2130706431 10.0.0.5 40000 typ host",
        "a=candidate:8 1 udp 2130706175 fd00::5 40001 typ host",
        "a=candidate:9 1 udp 1694498815 203.0.113.9 40000 typ srflx raddr 10.0.0.5 rport 40000",
        "m=application 40000 UDP/DTLS/SCTP webrtc-datachannel",
        "a=max-message-size:262144",
        "",
    ]
)


def test_the_answer_asks_for_redundancy() -> None:
    """Without this line a browser sends no in-band FEC, and every lost packet is concealed instead of mended."""
    lines = finish_answer(ANSWER).splitlines()

    assert lines[lines.index("a=rtpmap:96 opus/48000/2") + 1] == "a=fmtp:96 minptime=10;useinbandfec=1"


def test_a_format_line_that_is_there_is_completed() -> None:
    answer = ANSWER.replace("a=rtpmap:96 opus/48000/2", "a=rtpmap:96 opus/48000/2\r\na=fmtp:96 useinbandfec=0;stereo=1")

    formats = [line for line in finish_answer(answer).splitlines() if line.startswith("a=fmtp")]

    assert formats == ["a=fmtp:96 useinbandfec=1;stereo=1;minptime=10"]


def test_the_answer_names_our_message_size() -> None:
    assert "a=max-message-size:65536\r\n" in finish_answer(ANSWER)


def test_a_public_address_replaces_host_addresses_of_its_family() -> None:
    lines = finish_answer(ANSWER, public_address="198.51.100.4").splitlines()

    assert "a=candidate:7 1 udp 2130706431 198.51.100.4 40000 typ host" in lines
    assert "c=IN IP4 198.51.100.4" in lines
    assert "a=candidate:8 1 udp 2130706175 fd00::5 40001 typ host" in lines
    assert any(line.startswith("a=candidate:9") and "203.0.113.9" in line for line in lines)


def test_a_public_address_must_be_an_address() -> None:
    with pytest.raises(ConfigError, match="example"):
        finish_answer(ANSWER, public_address="example.org")


VIDEO = "m=video 9 UDP/TLS/RTP/SAVPF 96 97\na=rtpmap:96 VP8/90000\na=rtpmap:97 H264/90000\n"


@pytest.mark.parametrize(
    ("offer", "takes"),
    [
        pytest.param(VOICE, False, id="no-video"),
        pytest.param(VOICE + VIDEO, True, id="vp8"),
        pytest.param(VOICE + VIDEO.replace("VP8", "VP9"), False, id="no-vp8"),
        pytest.param(VOICE + VIDEO.replace("VP8", "AV1") + VIDEO, False, id="vp8-in-another-section"),
        pytest.param(VOICE + "a=rtpmap:96 VP8/90000\n", False, id="vp8-in-the-voice"),
    ],
)
def test_pictures_are_offered_to_whoever_takes_vp8(offer: str, takes: bool) -> None:
    """A page that prefers another codec gets VP8 all the same; one without it gets the voice alone."""
    assert takes_vp8(offer) is takes
