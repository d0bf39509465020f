"""The OpenAI Realtime (GA) protocol: one core without sockets, and the transports that carry it."""
