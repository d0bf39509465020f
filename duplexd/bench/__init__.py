"""The measuring rig: a real loudspeaker, microphone, browser and bad network, with one clock for all of them.

Nothing here knows the engine, except `memory.py`, which measures its bookkeeping directly and needs no rig. A bench
plays sound into a microphone, lets a browser talk to a server, and reads what left the loudspeaker; every time is
`clock.now()` of this host, so that a latency is a difference and nothing else.
"""
