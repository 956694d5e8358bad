"""Typed settings, one section per room: their definition, loading, cross-field checks and printing. Reads settings files only."""
