"""Sans-IO codecs and the one table from errors to answers. Bytes in, values out; no sockets, no models, no clock."""
