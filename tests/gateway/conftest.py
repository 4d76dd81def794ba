"""Fixtures: the databases, and a control plane on a database."""

from tests.databases import database as database
from tests.databases import database_url as database_url
from tests.databases import postgres_server as postgres_server
from tests.databases import postgres_url as postgres_url
from tests.databases import sqlite_template as sqlite_template
from tests.databases import sqlite_url as sqlite_url
from tests.gateway.plane import plane as plane
from tests.gateway.plane import plane_on_both as plane_on_both
from tests.gateway.plane import sources as sources
