"""From a failing case to a reported bug: its smallest case, the conditions under which it shows, and how bad it is."""
