"""Offers in, answers out: what is refused, what is dropped and what is added, as text and nothing else.

1. An offer is a stranger's text of any length: it is checked before a parser sees it, and refused with a sentence.
2. `.local` candidates are dropped: resolving them costs a second of multicast, and the page's own connectivity checks
   reveal the address anyway (peer-reflexive, RFC 8445 §7.3.1.3).
3. `a=end-of-candidates` is dropped: with it, an offer whose candidates cannot be reached fails at once, although the
   page would have reached us. The connect watchdog bounds the wait instead.
4. The answer names our own message size: a page then refuses a larger one itself, before it has sent it.
5. The answer says `useinbandfec=1`: a browser only sends redundancy (RFC 7587 §6.1) when it is asked to.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator

from duplexd.errors import ConfigError, InputRefused
from duplexd.webrtc.wire import MESSAGE_BYTES_MAX

OFFER_BYTES_MAX = 256 * 1024
SECTIONS_MAX = 8
CANDIDATES_MAX = 64  #: each becomes a stream of STUN packets to an address of the stranger's choice
OPUS_FORMAT = {"minptime": "10", "useinbandfec": "1"}

_SECTION = re.compile(r"m=([a-z]+) ([0-9]{1,5}) ([A-Z/]+) (.+)")
_OPUS = re.compile(r"a=rtpmap:([0-9]{1,3}) opus/48000", re.IGNORECASE)
_VP8 = re.compile(r"a=rtpmap:[0-9]{1,3} VP8/90000", re.IGNORECASE)
_ANSWERABLE = ("audio", "video", "application")
_DIRECTIONS = ("a=sendrecv", "a=sendonly", "a=recvonly", "a=inactive")


def check_offer(sdp: object, *, receives: bool = True) -> None:
    """Raises InputRefused, with a sentence, for an offer that cannot become a session.

    Args:    receives: whoever offers is to receive a voice; False: to send one.
    """
    if not isinstance(sdp, str) or not sdp.startswith("v=0"):
        raise InputRefused('The offer is not an SDP: it must be a text that begins with "v=0".')
    if len(sdp) > OFFER_BYTES_MAX or len(sdp.encode(errors="replace")) > OFFER_BYTES_MAX:
        raise InputRefused(f"The offer has more than {OFFER_BYTES_MAX} bytes; a browser's has about 6000.")
    sections = _sections(sdp.splitlines())
    _check_sections(sections)
    _check_voice(sections, receives=receives)
    _check_candidates(sdp)


def clean_offer(sdp: str) -> str:
    """The same offer without candidates that only cost time (module rules 2 and 3)."""
    return _join(line for line in sdp.splitlines() if not _is_dropped(line))


def takes_vp8(sdp: str) -> bool:
    """Whether the first video section of a checked offer knows VP8, the only one our pictures are sent as."""
    video = next((section for section in _sections(sdp.splitlines()) if section[0].startswith("m=video")), [])
    return any(_VP8.match(line) for line in video)


def finish_answer(sdp: str, *, public_address: str = "") -> str:
    """Mend aiortc's answer: ask for Opus redundancy, say our message size and the address people reach this host by.

    Args:    public_address: replaces the address of every host candidate of its family (ports stay: 1:1 NAT).
    Raises:  ConfigError if `public_address` is not an IP address.
    """
    lines = [_with_message_size(line) for line in _with_opus_format(sdp.splitlines())]
    if public_address:
        lines = [_readdress(line, public=_address(public_address)) for line in lines]
    return _join(lines)


# Checks -------------------------------------------------------------------------------------------------------------


def _sections(lines: Iterable[str]) -> list[list[str]]:
    sections: list[list[str]] = []
    for line in lines:
        if line.startswith("m="):
            sections.append([line])
        elif sections:
            sections[-1].append(line)
    return sections


def _check_sections(sections: list[list[str]]) -> None:
    if len(sections) > SECTIONS_MAX:
        raise InputRefused(f"The offer has {len(sections)} media sections; at most {SECTIONS_MAX} are answered.")
    for section in sections:
        parts = _SECTION.fullmatch(section[0])
        if parts is None or parts[1] not in _ANSWERABLE:
            raise InputRefused(f"The offer has a section that cannot be answered: {section[0][:80]!r}.")
    if sum(section[0].startswith("m=application") for section in sections) > 1:
        raise InputRefused("The offer has more than one data channel section.")


def _check_voice(sections: list[list[str]], *, receives: bool) -> None:
    audio = [section for section in sections if section[0].startswith("m=audio")]
    if not audio:
        raise InputRefused("The offer has no audio section; a session needs one, at least recvonly.")
    if not any(_OPUS.match(line) for line in audio[0]):
        raise InputRefused("The audio section of the offer lacks opus/48000, the only voice codec served here.")
    direction = _direction(audio[0])
    if not receives and direction in ("a=recvonly", "a=inactive"):
        raise InputRefused("The audio section of the offer does not send; it must be sendonly or sendrecv.")
    if receives and direction in ("a=sendonly", "a=inactive"):
        raise InputRefused("The audio section of the offer does not receive; it must be sendrecv or recvonly.")


def _check_candidates(sdp: str) -> None:
    count = sum(line.startswith("a=candidate") for line in sdp.splitlines())
    if count > CANDIDATES_MAX:
        raise InputRefused(f"The offer has {count} candidates; at most {CANDIDATES_MAX} are tried.")


def _direction(section: list[str]) -> str:
    return next((line.strip() for line in section if line.strip() in _DIRECTIONS), "a=sendrecv")


# Changes ------------------------------------------------------------------------------------------------------------


def _is_dropped(line: str) -> bool:
    if line.startswith("a=end-of-candidates"):
        return True
    if not line.startswith("a=candidate"):
        return False
    fields = line.split()
    # foundation component transport priority address port "typ" type: shorter ones would trip the parser.
    return len(fields) < 8 or fields[4].lower().endswith(".local") or fields[2].lower() != "udp"


def _with_opus_format(lines: list[str]) -> Iterator[str]:
    wanted = {match[1] for line in lines if (match := _OPUS.match(line))}
    present = {payload for line in lines if (payload := _format_of(line)) in wanted}
    for line in lines:
        if _format_of(line) in wanted:
            yield _merge_format(line)
            continue
        yield line
        match = _OPUS.match(line)
        if match and match[1] not in present:
            yield f"a=fmtp:{match[1]} " + ";".join(f"{key}={value}" for key, value in OPUS_FORMAT.items())


def _with_message_size(line: str) -> str:
    return f"a=max-message-size:{MESSAGE_BYTES_MAX}" if line.startswith("a=max-message-size:") else line


def _format_of(line: str) -> str | None:
    return line.removeprefix("a=fmtp:").split(" ", 1)[0] if line.startswith("a=fmtp:") else None


def _merge_format(line: str) -> str:
    head, _, text = line.partition(" ")
    fields = dict(item.strip().partition("=")[::2] for item in text.split(";") if item.strip())
    return f"{head} " + ";".join(f"{key}={value}" for key, value in (fields | OPUS_FORMAT).items())


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        raise ConfigError(f"public_address must be an IP address, not {text!r}.") from None


def _readdress(line: str, *, public: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    fields = line.split(" ")
    if line.startswith("a=candidate") and fields[7:8] == ["host"] and _family(fields[4]) == public.version:
        return " ".join([*fields[:4], str(public), *fields[5:]])
    if line.startswith("c=IN IP") and len(fields) == 3 and _family(fields[2]) == public.version:
        return f"c=IN IP{public.version} {public}"
    return line


def _family(address: str) -> int:
    try:
        return ipaddress.ip_address(address).version
    except ValueError:
        return 0


def _join(lines: Iterable[str]) -> str:
    return "".join(f"{line}\r\n" for line in lines)
