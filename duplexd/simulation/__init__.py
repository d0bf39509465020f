"""The simulated world for load: many people, a model without weights, cost files, all in virtual time (DESIGN §4).

    people (arrivals, person, ear) --facts--> EngineCore --launches--> device (costs that share a capacity)

The core is the one that serves people; everything else here stands in for sockets, lanes and a clock. Its sibling
`engine/simulator.py` simulates sound sample by sample for tests; this package simulates hours of many sessions, and a
chunk's playout is a line in it, not a row of frames.
"""
