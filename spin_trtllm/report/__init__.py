# SPDX-License-Identifier: Apache-2.0
"""The paper's studies, from traces: replays, figures with intervals, claims, one HTML page.

Data flows one way: traces -> `store` (replays, kept on disk) -> `studies` (findings, JSON) ->
`page` (HTML).
"""
