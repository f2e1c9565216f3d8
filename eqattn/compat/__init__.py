"""Other libraries' signatures."""
