"""The policy of speculation: how many tokens to draft, by what drafts bring and cost. Integers and floats, no torch."""
