"""The placement of tokens: the rank that holds each token, and the part of its micro-batch in which it is computed."""
