"""Front ends: sockets, endpoints, limits, timeouts. Codecs are in `protocols/`, models in `engine/`."""
