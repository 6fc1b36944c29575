"""Series a of a compressor's rows, copied between its ring and pages."""
