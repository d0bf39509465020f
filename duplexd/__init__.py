"""duplexd keeps live, full-duplex, multimodal sessions: the playback cursor measured at the ear drives everything."""

__version__ = "0.1.0"
