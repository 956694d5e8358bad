"""Test doubles and servers for tests: public, for users too. Nothing that the server itself imports."""
