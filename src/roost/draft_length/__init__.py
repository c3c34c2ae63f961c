"""The draft-length policy of speculative decoding: how many tokens to draft, by measured gain and cost; no torch."""
