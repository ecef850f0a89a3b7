-- A journal as refitd began (tables and plain records; no origin, no checksums), written by the code of that day: six versions on two
-- engines, of which 1 is deleted, 2 pinned, 5 rejected and 6 rolled back from; a load of 4 into b:1 had begun when the process was killed.
PRAGMA user_version=1;
CREATE TABLE versions (
	id TEXT NOT NULL, 
	run TEXT NOT NULL, 
	generation INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	state TEXT NOT NULL, 
	record BLOB NOT NULL, 
	PRIMARY KEY (id)
);
CREATE INDEX versions_by_state ON versions (state, generation, step);
CREATE INDEX versions_newest ON versions (generation, step, id);
CREATE INDEX versions_by_order ON versions (run, generation, step);
CREATE TABLE engines (
	id TEXT NOT NULL, 
	record BLOB NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE attempts (
	id TEXT NOT NULL, 
	engine TEXT NOT NULL, 
	version TEXT NOT NULL, 
	outcome TEXT, 
	record BLOB NOT NULL, 
	PRIMARY KEY (id)
);
CREATE INDEX ix_attempts_engine ON attempts (engine);
CREATE INDEX ix_attempts_version ON attempts (version);
CREATE TABLE fingerprints (
	version TEXT NOT NULL, 
	configuration TEXT NOT NULL, 
	fingerprint TEXT NOT NULL, 
	PRIMARY KEY (version, configuration)
);
CREATE TABLE rollouts (
	number INTEGER NOT NULL, 
	run TEXT NOT NULL, 
	version TEXT NOT NULL, 
	record BLOB NOT NULL, 
	PRIMARY KEY (number)
);
CREATE INDEX ix_rollouts_run ON rollouts (run);
CREATE TABLE events (
	seq INTEGER NOT NULL, 
	subject TEXT NOT NULL, 
	record BLOB NOT NULL, 
	PRIMARY KEY (seq)
);
CREATE INDEX ix_events_subject ON events (subject);
INSERT INTO versions VALUES ('run~v000001', 'run', 1, 1, 'DELETED', CAST('{"run":"run","order":{"generation":1,"step":1},"path":"run/v000001","state":"DELETED","created_at":"2026-11-21T20:22:33.218Z","kind":"full","base":null,"reason":null,"bytes":1324,"digest":"xxh3:f27cffdf847f86fd178b9599f7b0d037","inventory":"xxh3:e8a91c5f7047e6608243c5ca4d4f1ba8","signature":"xxh3:5525d2510f4ca635222a64a2bbda917b","owned":true,"noticed":false,"pinned":false,"barred":false,"served_at":"2026-11-21T20:22:33.240Z","allow_missing":false,"allow_extra":false,"metadata":{},"timings":{"validate":2.25184099690523,"load":1.0}}' AS BLOB));
INSERT INTO versions VALUES ('run~v000002', 'run', 1, 2, 'SEALED', CAST('{"run":"run","order":{"generation":1,"step":2},"path":"run/v000002","state":"SEALED","created_at":"2026-11-21T20:22:33.268Z","kind":"full","base":null,"reason":null,"bytes":1324,"digest":"xxh3:3367648afd2a52e3c47ec98469bbb731","inventory":"xxh3:e8a91c5f7047e6608243c5ca4d4f1ba8","signature":"xxh3:896123beaae841a22e647af4489e55b9","owned":true,"noticed":false,"pinned":true,"barred":false,"served_at":"2026-11-21T20:22:33.297Z","allow_missing":false,"allow_extra":false,"metadata":{},"timings":{"validate":6.5607989963609725,"load":1.0}}' AS BLOB));
INSERT INTO versions VALUES ('run~v000003', 'run', 1, 3, 'SEALED', CAST('{"run":"run","order":{"generation":1,"step":3},"path":"run/v000003","state":"SEALED","created_at":"2026-11-21T20:22:33.316Z","kind":"full","base":null,"reason":null,"bytes":1324,"digest":"xxh3:6f31cad16c56bdc1f97a35b085d8e806","inventory":"xxh3:e8a91c5f7047e6608243c5ca4d4f1ba8","signature":"xxh3:617359ec8cf44dba1146306bcf97285a","owned":true,"noticed":false,"pinned":false,"barred":false,"served_at":"2026-11-21T20:22:33.326Z","allow_missing":false,"allow_extra":false,"metadata":{},"timings":{"validate":3.3778279976104386,"load":1.0}}' AS BLOB));
INSERT INTO versions VALUES ('run~v000004', 'run', 1, 4, 'SEALED', CAST('{"run":"run","order":{"generation":1,"step":4},"path":"run/v000004","state":"SEALED","created_at":"2026-11-21T20:22:33.360Z","kind":"full","base":null,"reason":null,"bytes":1324,"digest":"xxh3:cb4ac43cde497d6e2001f5002e4fb4b1","inventory":"xxh3:e8a91c5f7047e6608243c5ca4d4f1ba8","signature":"xxh3:422d6b57278ed35c4c190ce7835a43d1","owned":true,"noticed":false,"pinned":false,"barred":false,"served_at":"2026-11-21T20:22:33.372Z","allow_missing":false,"allow_extra":false,"metadata":{},"timings":{"validate":1.482829000451602,"load":1.0}}' AS BLOB));
INSERT INTO versions VALUES ('run~v000005', 'run', 1, 5, 'REJECTED', CAST('{"run":"run","order":{"generation":1,"step":5},"path":"run/v000005","state":"REJECTED","created_at":"2026-11-21T20:22:33.488Z","kind":"full","base":null,"reason":"tensor layer.0.weight (F32 [4, 3]) is missing (the model is /srv/refitd/base): an engine would go on with its old values; publish every tensor, or say allow_missing in the notice","bytes":null,"digest":null,"inventory":null,"signature":null,"owned":false,"noticed":false,"pinned":false,"barred":false,"served_at":null,"allow_missing":false,"allow_extra":false,"metadata":{},"timings":{}}' AS BLOB));
INSERT INTO versions VALUES ('run~v000006', 'run', 1, 6, 'SEALED', CAST('{"run":"run","order":{"generation":1,"step":6},"path":"run/v000006","state":"SEALED","created_at":"2026-11-21T20:22:33.537Z","kind":"full","base":null,"reason":null,"bytes":1324,"digest":"xxh3:59b27925948bc499ba1454cff62bc89e","inventory":"xxh3:e8a91c5f7047e6608243c5ca4d4f1ba8","signature":"xxh3:8ef7613836ec59a76592cde93d74ab20","owned":true,"noticed":false,"pinned":false,"barred":true,"served_at":"2026-11-21T20:22:33.560Z","allow_missing":false,"allow_extra":false,"metadata":{},"timings":{"validate":3.4482820046832785,"load":1.0}}' AS BLOB));
INSERT INTO engines VALUES ('a:1', CAST('{"id":"a:1","url":"http://a:1","run":"run","source":"settings","state":"IN_SYNC","serving":"run~v000004","known":true,"resume_owed":false,"unproven":[],"weight_version":"4","model_path":"/srv/refitd/root/run/v000004","configuration":"simulated","startup_path":"/base","reason":null,"failures":0,"skipped":0,"unreachable_since":null,"last_attempt":{"id":"c756833c9173426eb5d31653cdc61046","engine":"a:1","version":"run~v000004","started_at":"2026-11-21T20:22:33.564Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}}' AS BLOB));
INSERT INTO engines VALUES ('b:1', CAST('{"id":"b:1","url":"http://b:1","run":"run","source":"settings","state":"IN_SYNC","serving":"run~v000004","known":true,"resume_owed":false,"unproven":[],"weight_version":"4","model_path":"/srv/refitd/root/run/v000004","configuration":"simulated","startup_path":"/base","reason":null,"failures":0,"skipped":0,"unreachable_since":null,"last_attempt":{"id":"cc2bbe04415d4ad4b5c449bb4ad53c82","engine":"b:1","version":"run~v000004","started_at":"2026-11-21T20:22:33.564Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}}' AS BLOB));
INSERT INTO attempts VALUES ('2f68013c65fb42a7afeeb7a95892f4f7', 'b:1', 'run~v000001', 'ACK', CAST('{"id":"2f68013c65fb42a7afeeb7a95892f4f7","engine":"b:1","version":"run~v000001","started_at":"2026-11-21T20:22:33.229Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}' AS BLOB));
INSERT INTO attempts VALUES ('479b8c282e884b58b0e54c5ee2349edf', 'a:1', 'run~v000001', 'ACK', CAST('{"id":"479b8c282e884b58b0e54c5ee2349edf","engine":"a:1","version":"run~v000001","started_at":"2026-11-21T20:22:33.229Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}' AS BLOB));
INSERT INTO attempts VALUES ('12b756332e1c43acb9614fe8be190b5d', 'b:1', 'run~v000002', 'ACK', CAST('{"id":"12b756332e1c43acb9614fe8be190b5d","engine":"b:1","version":"run~v000002","started_at":"2026-11-21T20:22:33.282Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}' AS BLOB));
INSERT INTO attempts VALUES ('05ba6a5f419f4c97ba434f6840de6863', 'a:1', 'run~v000002', 'ACK', CAST('{"id":"05ba6a5f419f4c97ba434f6840de6863","engine":"a:1","version":"run~v000002","started_at":"2026-11-21T20:22:33.282Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}' AS BLOB));
INSERT INTO attempts VALUES ('70fd4b053cc54bd8b2fcdb1645159e32', 'b:1', 'run~v000003', 'ACK', CAST('{"id":"70fd4b053cc54bd8b2fcdb1645159e32","engine":"b:1","version":"run~v000003","started_at":"2026-11-21T20:22:33.322Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}' AS BLOB));
INSERT INTO attempts VALUES ('1f2cfd34dd7143af9575670564c37c44', 'a:1', 'run~v000003', 'ACK', CAST('{"id":"1f2cfd34dd7143af9575670564c37c44","engine":"a:1","version":"run~v000003","started_at":"2026-11-21T20:22:33.323Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}' AS BLOB));
INSERT INTO attempts VALUES ('ab251565378c42b6b63b8da4abab2f7b', 'a:1', 'run~v000004', 'ACK', CAST('{"id":"ab251565378c42b6b63b8da4abab2f7b","engine":"a:1","version":"run~v000004","started_at":"2026-11-21T20:22:33.365Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}' AS BLOB));
INSERT INTO attempts VALUES ('b02da4b5cc094adeae99e3816b3991c7', 'b:1', 'run~v000004', 'ACK', CAST('{"id":"b02da4b5cc094adeae99e3816b3991c7","engine":"b:1","version":"run~v000004","started_at":"2026-11-21T20:22:33.365Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}' AS BLOB));
INSERT INTO attempts VALUES ('0a84f84c985740e4877c8f8cde171d00', 'b:1', 'run~v000006', 'ACK', CAST('{"id":"0a84f84c985740e4877c8f8cde171d00","engine":"b:1","version":"run~v000006","started_at":"2026-11-21T20:22:33.550Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}' AS BLOB));
INSERT INTO attempts VALUES ('3384503d94b5442885cb89378c3c16b9', 'a:1', 'run~v000006', 'ACK', CAST('{"id":"3384503d94b5442885cb89378c3c16b9","engine":"a:1","version":"run~v000006","started_at":"2026-11-21T20:22:33.551Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}' AS BLOB));
INSERT INTO attempts VALUES ('cc2bbe04415d4ad4b5c449bb4ad53c82', 'b:1', 'run~v000004', 'ACK', CAST('{"id":"cc2bbe04415d4ad4b5c449bb4ad53c82","engine":"b:1","version":"run~v000004","started_at":"2026-11-21T20:22:33.564Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}' AS BLOB));
INSERT INTO attempts VALUES ('c756833c9173426eb5d31653cdc61046', 'a:1', 'run~v000004', 'ACK', CAST('{"id":"c756833c9173426eb5d31653cdc61046","engine":"a:1","version":"run~v000004","started_at":"2026-11-21T20:22:33.564Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}' AS BLOB));
INSERT INTO attempts VALUES ('open', 'b:1', 'run~v000004', NULL, CAST('{"id":"open","engine":"b:1","version":"run~v000004","started_at":"2026-11-21T12:00:00.000Z","outcome":null,"reason":null,"timings":{}}' AS BLOB));
INSERT INTO fingerprints VALUES ('run~v000001', 'simulated', 'contents of /srv/refitd/root/run/v000001');
INSERT INTO fingerprints VALUES ('run~v000002', 'simulated', 'contents of /srv/refitd/root/run/v000002');
INSERT INTO fingerprints VALUES ('run~v000003', 'simulated', 'contents of /srv/refitd/root/run/v000003');
INSERT INTO fingerprints VALUES ('run~v000004', 'simulated', 'contents of /srv/refitd/root/run/v000004');
INSERT INTO fingerprints VALUES ('run~v000006', 'simulated', 'contents of /srv/refitd/root/run/v000006');
INSERT INTO rollouts VALUES (1, 'run', 'run~v000001', CAST('{"number":1,"run":"run","version":"run~v000001","cause":"newest good version","started_at":"2026-11-21T20:22:33.228Z","state":"COMPLETE"}' AS BLOB));
INSERT INTO rollouts VALUES (2, 'run', 'run~v000002', CAST('{"number":2,"run":"run","version":"run~v000002","cause":"newest good version","started_at":"2026-11-21T20:22:33.278Z","state":"COMPLETE"}' AS BLOB));
INSERT INTO rollouts VALUES (3, 'run', 'run~v000003', CAST('{"number":3,"run":"run","version":"run~v000003","cause":"newest good version","started_at":"2026-11-21T20:22:33.322Z","state":"COMPLETE"}' AS BLOB));
INSERT INTO rollouts VALUES (4, 'run', 'run~v000004', CAST('{"number":4,"run":"run","version":"run~v000004","cause":"newest good version","started_at":"2026-11-21T20:22:33.364Z","state":"COMPLETE"}' AS BLOB));
INSERT INTO rollouts VALUES (5, 'run', 'run~v000006', CAST('{"number":5,"run":"run","version":"run~v000006","cause":"newest good version","started_at":"2026-11-21T20:22:33.550Z","state":"ROLLED_BACK"}' AS BLOB));
INSERT INTO rollouts VALUES (6, 'run', 'run~v000004', CAST('{"number":6,"run":"run","version":"run~v000004","cause":"rolled back from run~v000006","started_at":"2026-11-21T20:22:33.563Z","state":"COMPLETE"}' AS BLOB));
INSERT INTO events VALUES (1, 'a:1', CAST('{"seq":1,"at":"2026-11-21T20:22:33.214Z","kind":"engine","subject":"a:1","text":"added","data":{"state":"PROBING"}}' AS BLOB));
INSERT INTO events VALUES (2, 'b:1', CAST('{"seq":2,"at":"2026-11-21T20:22:33.215Z","kind":"engine","subject":"b:1","text":"added","data":{"state":"PROBING"}}' AS BLOB));
INSERT INTO events VALUES (3, 'a:1', CAST('{"seq":3,"at":"2026-11-21T20:22:33.218Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves start-up weights (no version to serve yet)","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (4, 'b:1', CAST('{"seq":4,"at":"2026-11-21T20:22:33.218Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves start-up weights (no version to serve yet)","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (5, 'run~v000001', CAST('{"seq":5,"at":"2026-11-21T20:22:33.219Z","kind":"version","subject":"run~v000001","text":"found in the root","data":{"state":"ANNOUNCED","step":1,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (6, 'a:1', CAST('{"seq":6,"at":"2026-11-21T20:22:33.221Z","kind":"engine","subject":"a:1","text":"follows run run","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (7, 'b:1', CAST('{"seq":7,"at":"2026-11-21T20:22:33.222Z","kind":"engine","subject":"b:1","text":"follows run run","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (8, 'run~v000001', CAST('{"seq":8,"at":"2026-11-21T20:22:33.228Z","kind":"version","subject":"run~v000001","text":"sealed: 1324 bytes in good order","data":{"state":"SEALED","step":1,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (9, 'run~v000001', CAST('{"seq":9,"at":"2026-11-21T20:22:33.228Z","kind":"rollout","subject":"run~v000001","text":"rollout 1 to run~v000001: newest good version","data":{"number":1,"state":"PENDING"}}' AS BLOB));
INSERT INTO events VALUES (10, 'b:1', CAST('{"seq":10,"at":"2026-11-21T20:22:33.229Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000001","data":{"state":"UPDATING"}}' AS BLOB));
INSERT INTO events VALUES (11, 'a:1', CAST('{"seq":11,"at":"2026-11-21T20:22:33.229Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000001","data":{"state":"UPDATING"}}' AS BLOB));
INSERT INTO events VALUES (12, 'run~v000001', CAST('{"seq":12,"at":"2026-11-21T20:22:33.229Z","kind":"rollout","subject":"run~v000001","text":"rollout 1 to run~v000001: ROLLING","data":{"number":1,"state":"ROLLING"}}' AS BLOB));
INSERT INTO events VALUES (13, 'b:1', CAST('{"seq":13,"at":"2026-11-21T20:22:33.236Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000001","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (14, 'a:1', CAST('{"seq":14,"at":"2026-11-21T20:22:33.236Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000001","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (15, 'run~v000001', CAST('{"seq":15,"at":"2026-11-21T20:22:33.237Z","kind":"rollout","subject":"run~v000001","text":"rollout 1 to run~v000001: COMPLETE","data":{"number":1,"state":"COMPLETE"}}' AS BLOB));
INSERT INTO events VALUES (16, 'run~v000001', CAST('{"seq":16,"at":"2026-11-21T20:22:33.241Z","kind":"version","subject":"run~v000001","text":"served: step 1 is proven on every reachable engine","data":{"state":"SEALED","step":1,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (17, 'run~v000002', CAST('{"seq":17,"at":"2026-11-21T20:22:33.269Z","kind":"version","subject":"run~v000002","text":"found in the root","data":{"state":"ANNOUNCED","step":2,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (18, 'run~v000002', CAST('{"seq":18,"at":"2026-11-21T20:22:33.277Z","kind":"version","subject":"run~v000002","text":"sealed: 1324 bytes in good order","data":{"state":"SEALED","step":2,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (19, 'run~v000002', CAST('{"seq":19,"at":"2026-11-21T20:22:33.278Z","kind":"rollout","subject":"run~v000002","text":"rollout 2 to run~v000002: newest good version","data":{"number":2,"state":"PENDING"}}' AS BLOB));
INSERT INTO events VALUES (20, 'b:1', CAST('{"seq":20,"at":"2026-11-21T20:22:33.282Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000002","data":{"state":"UPDATING"}}' AS BLOB));
INSERT INTO events VALUES (21, 'a:1', CAST('{"seq":21,"at":"2026-11-21T20:22:33.283Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000002","data":{"state":"UPDATING"}}' AS BLOB));
INSERT INTO events VALUES (22, 'run~v000002', CAST('{"seq":22,"at":"2026-11-21T20:22:33.283Z","kind":"rollout","subject":"run~v000002","text":"rollout 2 to run~v000002: ROLLING","data":{"number":2,"state":"ROLLING"}}' AS BLOB));
INSERT INTO events VALUES (23, 'b:1', CAST('{"seq":23,"at":"2026-11-21T20:22:33.296Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000002","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (24, 'a:1', CAST('{"seq":24,"at":"2026-11-21T20:22:33.296Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000002","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (25, 'run~v000002', CAST('{"seq":25,"at":"2026-11-21T20:22:33.297Z","kind":"rollout","subject":"run~v000002","text":"rollout 2 to run~v000002: COMPLETE","data":{"number":2,"state":"COMPLETE"}}' AS BLOB));
INSERT INTO events VALUES (26, 'run~v000002', CAST('{"seq":26,"at":"2026-11-21T20:22:33.297Z","kind":"version","subject":"run~v000002","text":"served: step 2 is proven on every reachable engine","data":{"state":"SEALED","step":2,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (27, 'run~v000003', CAST('{"seq":27,"at":"2026-11-21T20:22:33.316Z","kind":"version","subject":"run~v000003","text":"found in the root","data":{"state":"ANNOUNCED","step":3,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (28, 'run~v000003', CAST('{"seq":28,"at":"2026-11-21T20:22:33.321Z","kind":"version","subject":"run~v000003","text":"sealed: 1324 bytes in good order","data":{"state":"SEALED","step":3,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (29, 'run~v000003', CAST('{"seq":29,"at":"2026-11-21T20:22:33.322Z","kind":"rollout","subject":"run~v000003","text":"rollout 3 to run~v000003: newest good version","data":{"number":3,"state":"PENDING"}}' AS BLOB));
INSERT INTO events VALUES (30, 'b:1', CAST('{"seq":30,"at":"2026-11-21T20:22:33.322Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000003","data":{"state":"UPDATING"}}' AS BLOB));
INSERT INTO events VALUES (31, 'a:1', CAST('{"seq":31,"at":"2026-11-21T20:22:33.323Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000003","data":{"state":"UPDATING"}}' AS BLOB));
INSERT INTO events VALUES (32, 'run~v000003', CAST('{"seq":32,"at":"2026-11-21T20:22:33.323Z","kind":"rollout","subject":"run~v000003","text":"rollout 3 to run~v000003: ROLLING","data":{"number":3,"state":"ROLLING"}}' AS BLOB));
INSERT INTO events VALUES (33, 'b:1', CAST('{"seq":33,"at":"2026-11-21T20:22:33.325Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000003","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (34, 'a:1', CAST('{"seq":34,"at":"2026-11-21T20:22:33.325Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000003","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (35, 'run~v000003', CAST('{"seq":35,"at":"2026-11-21T20:22:33.325Z","kind":"rollout","subject":"run~v000003","text":"rollout 3 to run~v000003: COMPLETE","data":{"number":3,"state":"COMPLETE"}}' AS BLOB));
INSERT INTO events VALUES (36, 'run~v000003', CAST('{"seq":36,"at":"2026-11-21T20:22:33.326Z","kind":"version","subject":"run~v000003","text":"served: step 3 is proven on every reachable engine","data":{"state":"SEALED","step":3,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (37, 'run~v000004', CAST('{"seq":37,"at":"2026-11-21T20:22:33.360Z","kind":"version","subject":"run~v000004","text":"found in the root","data":{"state":"ANNOUNCED","step":4,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (38, 'run~v000004', CAST('{"seq":38,"at":"2026-11-21T20:22:33.364Z","kind":"version","subject":"run~v000004","text":"sealed: 1324 bytes in good order","data":{"state":"SEALED","step":4,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (39, 'run~v000004', CAST('{"seq":39,"at":"2026-11-21T20:22:33.364Z","kind":"rollout","subject":"run~v000004","text":"rollout 4 to run~v000004: newest good version","data":{"number":4,"state":"PENDING"}}' AS BLOB));
INSERT INTO events VALUES (40, 'a:1', CAST('{"seq":40,"at":"2026-11-21T20:22:33.365Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000004","data":{"state":"UPDATING"}}' AS BLOB));
INSERT INTO events VALUES (41, 'b:1', CAST('{"seq":41,"at":"2026-11-21T20:22:33.365Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000004","data":{"state":"UPDATING"}}' AS BLOB));
INSERT INTO events VALUES (42, 'run~v000004', CAST('{"seq":42,"at":"2026-11-21T20:22:33.365Z","kind":"rollout","subject":"run~v000004","text":"rollout 4 to run~v000004: ROLLING","data":{"number":4,"state":"ROLLING"}}' AS BLOB));
INSERT INTO events VALUES (43, 'a:1', CAST('{"seq":43,"at":"2026-11-21T20:22:33.371Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000004","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (44, 'b:1', CAST('{"seq":44,"at":"2026-11-21T20:22:33.372Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000004","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (45, 'run~v000004', CAST('{"seq":45,"at":"2026-11-21T20:22:33.372Z","kind":"rollout","subject":"run~v000004","text":"rollout 4 to run~v000004: COMPLETE","data":{"number":4,"state":"COMPLETE"}}' AS BLOB));
INSERT INTO events VALUES (46, 'run~v000004', CAST('{"seq":46,"at":"2026-11-21T20:22:33.372Z","kind":"version","subject":"run~v000004","text":"served: step 4 is proven on every reachable engine","data":{"state":"SEALED","step":4,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (47, 'run~v000002', CAST('{"seq":47,"at":"2026-11-21T20:22:33.425Z","kind":"version","subject":"run~v000002","text":"pinned","data":{"state":"SEALED","step":2,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (48, 'run~v000001', CAST('{"seq":48,"at":"2026-11-21T20:22:33.444Z","kind":"version","subject":"run~v000001","text":"retired: nobody needs it","data":{"state":"RETIRED","step":1,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (49, 'run~v000001', CAST('{"seq":49,"at":"2026-11-21T20:22:33.468Z","kind":"version","subject":"run~v000001","text":"deleted","data":{"state":"DELETED","step":1,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (50, 'run~v000005', CAST('{"seq":50,"at":"2026-11-21T20:22:33.488Z","kind":"version","subject":"run~v000005","text":"found in the root","data":{"state":"ANNOUNCED","step":5,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (51, 'run~v000005', CAST('{"seq":51,"at":"2026-11-21T20:22:33.491Z","kind":"version","subject":"run~v000005","text":"rejected: tensor layer.0.weight (F32 [4, 3]) is missing (the model is /srv/refitd/base): an engine would go on with its old values; publish every tensor, or say allow_missing in the notice","data":{"state":"REJECTED","step":5,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (52, 'run~v000006', CAST('{"seq":52,"at":"2026-11-21T20:22:33.537Z","kind":"version","subject":"run~v000006","text":"found in the root","data":{"state":"ANNOUNCED","step":6,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (53, 'run~v000006', CAST('{"seq":53,"at":"2026-11-21T20:22:33.549Z","kind":"version","subject":"run~v000006","text":"sealed: 1324 bytes in good order","data":{"state":"SEALED","step":6,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (54, 'run~v000006', CAST('{"seq":54,"at":"2026-11-21T20:22:33.550Z","kind":"rollout","subject":"run~v000006","text":"rollout 5 to run~v000006: newest good version","data":{"number":5,"state":"PENDING"}}' AS BLOB));
INSERT INTO events VALUES (55, 'b:1', CAST('{"seq":55,"at":"2026-11-21T20:22:33.551Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000006","data":{"state":"UPDATING"}}' AS BLOB));
INSERT INTO events VALUES (56, 'a:1', CAST('{"seq":56,"at":"2026-11-21T20:22:33.551Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000006","data":{"state":"UPDATING"}}' AS BLOB));
INSERT INTO events VALUES (57, 'run~v000006', CAST('{"seq":57,"at":"2026-11-21T20:22:33.551Z","kind":"rollout","subject":"run~v000006","text":"rollout 5 to run~v000006: ROLLING","data":{"number":5,"state":"ROLLING"}}' AS BLOB));
INSERT INTO events VALUES (58, 'b:1', CAST('{"seq":58,"at":"2026-11-21T20:22:33.559Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000006","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (59, 'a:1', CAST('{"seq":59,"at":"2026-11-21T20:22:33.559Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000006","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (60, 'run~v000006', CAST('{"seq":60,"at":"2026-11-21T20:22:33.559Z","kind":"rollout","subject":"run~v000006","text":"rollout 5 to run~v000006: COMPLETE","data":{"number":5,"state":"COMPLETE"}}' AS BLOB));
INSERT INTO events VALUES (61, 'run~v000006', CAST('{"seq":61,"at":"2026-11-21T20:22:33.560Z","kind":"version","subject":"run~v000006","text":"served: step 6 is proven on every reachable engine","data":{"state":"SEALED","step":6,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (62, 'run~v000006', CAST('{"seq":62,"at":"2026-11-21T20:22:33.563Z","kind":"version","subject":"run~v000006","text":"barred: run run rolls back to run~v000004","data":{"state":"SEALED","step":6,"run":"run"}}' AS BLOB));
INSERT INTO events VALUES (63, 'run~v000006', CAST('{"seq":63,"at":"2026-11-21T20:22:33.563Z","kind":"rollout","subject":"run~v000006","text":"rollout 5 to run~v000006 is ROLLED_BACK","data":{"number":5,"state":"ROLLED_BACK"}}' AS BLOB));
INSERT INTO events VALUES (64, 'run~v000004', CAST('{"seq":64,"at":"2026-11-21T20:22:33.563Z","kind":"rollout","subject":"run~v000004","text":"rollout 6 to run~v000004: rolled back from run~v000006","data":{"number":6,"state":"PENDING"}}' AS BLOB));
INSERT INTO events VALUES (65, 'b:1', CAST('{"seq":65,"at":"2026-11-21T20:22:33.564Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000004","data":{"state":"UPDATING"}}' AS BLOB));
INSERT INTO events VALUES (66, 'a:1', CAST('{"seq":66,"at":"2026-11-21T20:22:33.564Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000004","data":{"state":"UPDATING"}}' AS BLOB));
INSERT INTO events VALUES (67, 'run~v000004', CAST('{"seq":67,"at":"2026-11-21T20:22:33.564Z","kind":"rollout","subject":"run~v000004","text":"rollout 6 to run~v000004: ROLLING","data":{"number":6,"state":"ROLLING"}}' AS BLOB));
INSERT INTO events VALUES (68, 'b:1', CAST('{"seq":68,"at":"2026-11-21T20:22:33.566Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000004","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (69, 'a:1', CAST('{"seq":69,"at":"2026-11-21T20:22:33.567Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000004","data":{"state":"IN_SYNC"}}' AS BLOB));
INSERT INTO events VALUES (70, 'run~v000004', CAST('{"seq":70,"at":"2026-11-21T20:22:33.567Z","kind":"rollout","subject":"run~v000004","text":"rollout 6 to run~v000004: COMPLETE","data":{"number":6,"state":"COMPLETE"}}' AS BLOB));
