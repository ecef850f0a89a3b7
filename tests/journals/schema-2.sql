-- What the code of that day made of schema-1-webhooks.sql by its step to schema 2.
PRAGMA user_version=2;
CREATE TABLE versions (
	id TEXT NOT NULL, 
	run TEXT NOT NULL, 
	generation INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	state TEXT NOT NULL, 
	record BLOB NOT NULL, 
	PRIMARY KEY (id)
);
CREATE INDEX versions_by_order ON versions (run, generation, step);
CREATE INDEX versions_newest ON versions (generation, step, id);
CREATE INDEX versions_by_state ON versions (state, generation, step);
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
CREATE TABLE deliveries (
	number INTEGER NOT NULL, 
	id TEXT NOT NULL, 
	state TEXT NOT NULL, 
	record BLOB NOT NULL, 
	PRIMARY KEY (number), 
	UNIQUE (id)
);
CREATE INDEX ix_deliveries_state ON deliveries (state);
CREATE TABLE origin (
	id INTEGER NOT NULL, 
	record BLOB NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO versions VALUES ('run~v000001', 'run', 1, 1, 'DELETED', CAST('{"run":"run","order":{"generation":1,"step":1},"path":"run/v000001","state":"DELETED","created_at":"2026-11-21T20:22:37.525Z","kind":"full","base":null,"reason":"not one of the newest 2 good versions of run run, and nobody needs it","code":null,"bytes":1361,"digest":"xxh3:f27cffdf847f86fd178b9599f7b0d037","weights":"xxh3:f21412c444630b695af11c15b914a1e9","shards":"xxh3:0f02b9783c50339f2c3ab95d2fc0824f","inventory":"xxh3:e8a91c5f7047e6608243c5ca4d4f1ba8","fingerprints":null,"signature":"xxh3:560caeea020e6e2c747421ffb6fd5653","owned":true,"noticed":false,"pinned":false,"barred":false,"served_at":"2026-11-21T20:22:37.551Z","allow_missing":false,"allow_extra":false,"metadata":{},"timings":{"seen":14.92004600004293,"validate":2.3652110030525364,"load":1.0}}
cf54d288b242d171' AS BLOB));
INSERT INTO versions VALUES ('run~v000002', 'run', 1, 2, 'SEALED', CAST('{"run":"run","order":{"generation":1,"step":2},"path":"run/v000002","state":"SEALED","created_at":"2026-11-21T20:22:37.576Z","kind":"full","base":null,"reason":null,"code":null,"bytes":1361,"digest":"xxh3:3367648afd2a52e3c47ec98469bbb731","weights":"xxh3:064ccb7688e227b6c55d565294717b71","shards":"xxh3:0f02b9783c50339f2c3ab95d2fc0824f","inventory":"xxh3:e8a91c5f7047e6608243c5ca4d4f1ba8","fingerprints":null,"signature":"xxh3:c7603cd82a5d6d492df96afeec60783b","owned":true,"noticed":false,"pinned":true,"barred":false,"served_at":"2026-11-21T20:22:37.595Z","allow_missing":false,"allow_extra":false,"metadata":{},"timings":{"seen":5.470091004099231,"validate":6.703584003844298,"load":1.0}}
89e382a2508e1539' AS BLOB));
INSERT INTO versions VALUES ('run~v000003', 'run', 1, 3, 'SEALED', CAST('{"run":"run","order":{"generation":1,"step":3},"path":"run/v000003","state":"SEALED","created_at":"2026-11-21T20:22:37.622Z","kind":"full","base":null,"reason":null,"code":null,"bytes":1361,"digest":"xxh3:6f31cad16c56bdc1f97a35b085d8e806","weights":"xxh3:35acacbf23b4df10398b2fd6089191ee","shards":"xxh3:0f02b9783c50339f2c3ab95d2fc0824f","inventory":"xxh3:e8a91c5f7047e6608243c5ca4d4f1ba8","fingerprints":null,"signature":"xxh3:fff3cf76a7cc7454a17ecef805fc4932","owned":true,"noticed":false,"pinned":false,"barred":false,"served_at":"2026-11-21T20:22:37.635Z","allow_missing":false,"allow_extra":false,"metadata":{},"timings":{"seen":3.921465002349578,"validate":3.4582810039864853,"load":1.0}}
af990610a78f83b5' AS BLOB));
INSERT INTO versions VALUES ('run~v000004', 'run', 1, 4, 'SEALED', CAST('{"run":"run","order":{"generation":1,"step":4},"path":"run/v000004","state":"SEALED","created_at":"2026-11-21T20:22:37.666Z","kind":"full","base":null,"reason":null,"code":null,"bytes":1361,"digest":"xxh3:cb4ac43cde497d6e2001f5002e4fb4b1","weights":"xxh3:851b74df935b2377c07ddb63d260c1bf","shards":"xxh3:0f02b9783c50339f2c3ab95d2fc0824f","inventory":"xxh3:e8a91c5f7047e6608243c5ca4d4f1ba8","fingerprints":null,"signature":"xxh3:6defc625789280c171b3d3297c95d149","owned":true,"noticed":false,"pinned":false,"barred":false,"served_at":"2026-11-21T20:22:37.682Z","allow_missing":false,"allow_extra":false,"metadata":{},"timings":{"seen":4.138279000471812,"validate":6.395096999767702,"load":1.0}}
b08040c788dc99cd' AS BLOB));
INSERT INTO versions VALUES ('run~v000005', 'run', 1, 5, 'REJECTED', CAST('{"run":"run","order":{"generation":1,"step":5},"path":"run/v000005","state":"REJECTED","created_at":"2026-11-21T20:22:37.783Z","kind":"full","base":null,"reason":"tensor layer.0.weight (F32 [4, 3]) is missing (the model is /srv/refitd/base): an engine would go on with its old values; publish every tensor, or say allow_missing in the notice","code":"missing-tensor","bytes":null,"digest":null,"weights":null,"shards":null,"inventory":null,"fingerprints":null,"signature":null,"owned":false,"noticed":false,"pinned":false,"barred":true,"served_at":null,"allow_missing":false,"allow_extra":false,"metadata":{},"timings":{}}
60cf94246320f0e3' AS BLOB));
INSERT INTO versions VALUES ('run~v000006', 'run', 1, 6, 'SEALED', CAST('{"run":"run","order":{"generation":1,"step":6},"path":"run/v000006","state":"SEALED","created_at":"2026-11-21T20:22:37.830Z","kind":"full","base":null,"reason":null,"code":null,"bytes":1361,"digest":"xxh3:59b27925948bc499ba1454cff62bc89e","weights":"xxh3:7aa107cd5b7bab3bf9a040f380b5f09d","shards":"xxh3:0f02b9783c50339f2c3ab95d2fc0824f","inventory":"xxh3:e8a91c5f7047e6608243c5ca4d4f1ba8","fingerprints":null,"signature":"xxh3:6358b0da8055c76c748cbed589e13c37","owned":true,"noticed":false,"pinned":false,"barred":true,"served_at":"2026-11-21T20:22:37.851Z","allow_missing":false,"allow_extra":false,"metadata":{},"timings":{"seen":5.796261997602414,"validate":6.028478994267061,"load":1.0}}
66b471c6f34c7c45' AS BLOB));
INSERT INTO engines VALUES ('a:1', CAST('{"id":"a:1","url":"http://a:1","run":"run","run_named":false,"source":"settings","state":"IN_SYNC","serving":"run~v000004","known":true,"resume_owed":false,"unproven":[],"weight_version":"4","model_path":"/srv/refitd/root/run/v000004","named_before":null,"configuration":"simulated","startup_path":"/base","plugin":null,"stock_reason":null,"beneath":null,"wants_full":false,"reason":null,"failures":0,"taints":0,"strikes":{},"skipped":0,"unreachable_since":null,"last_attempt":{"id":"c948983ce668470b919138b3017aa030","engine":"a:1","version":"run~v000004","started_at":"2026-11-21T20:22:37.855Z","outcome":"ACK","reason":null,"timings":{"load":1.0}},"removed":false}
2c39f593035319e1' AS BLOB));
INSERT INTO engines VALUES ('b:1', CAST('{"id":"b:1","url":"http://b:1","run":"run","run_named":false,"source":"settings","state":"IN_SYNC","serving":"run~v000004","known":true,"resume_owed":false,"unproven":[],"weight_version":"4","model_path":"/srv/refitd/root/run/v000004","named_before":null,"configuration":"simulated","startup_path":"/base","plugin":null,"stock_reason":null,"beneath":null,"wants_full":false,"reason":null,"failures":0,"taints":0,"strikes":{},"skipped":0,"unreachable_since":null,"last_attempt":{"id":"0afc1f9489d74a6f9cbe524ea65565f2","engine":"b:1","version":"run~v000004","started_at":"2026-11-21T20:22:37.855Z","outcome":"ACK","reason":null,"timings":{"load":1.0}},"removed":false}
0d5bda0f3b9a4182' AS BLOB));
INSERT INTO attempts VALUES ('b7fdd71daac249bcba7786ea2ccd10f5', 'a:1', 'run~v000001', 'ACK', CAST('{"id":"b7fdd71daac249bcba7786ea2ccd10f5","engine":"a:1","version":"run~v000001","started_at":"2026-11-21T20:22:37.543Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
c7eb7e9093df4d7c' AS BLOB));
INSERT INTO attempts VALUES ('2f83a70055bc451e958ae30abacb2f0a', 'b:1', 'run~v000001', 'ACK', CAST('{"id":"2f83a70055bc451e958ae30abacb2f0a","engine":"b:1","version":"run~v000001","started_at":"2026-11-21T20:22:37.544Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
c366578c704ebbad' AS BLOB));
INSERT INTO attempts VALUES ('c6d7d65b2df54c4d94963f249e1fcbae', 'a:1', 'run~v000002', 'ACK', CAST('{"id":"c6d7d65b2df54c4d94963f249e1fcbae","engine":"a:1","version":"run~v000002","started_at":"2026-11-21T20:22:37.589Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
b0618fc4736a0a0f' AS BLOB));
INSERT INTO attempts VALUES ('4e4e8c230c174211b291352aaeb30703', 'b:1', 'run~v000002', 'ACK', CAST('{"id":"4e4e8c230c174211b291352aaeb30703","engine":"b:1","version":"run~v000002","started_at":"2026-11-21T20:22:37.590Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
4bb50f077c8bf04a' AS BLOB));
INSERT INTO attempts VALUES ('4e75b1af5ffc4d54b528dcc8d04f0468', 'a:1', 'run~v000003', 'ACK', CAST('{"id":"4e75b1af5ffc4d54b528dcc8d04f0468","engine":"a:1","version":"run~v000003","started_at":"2026-11-21T20:22:37.630Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
7b42045e3ed56d03' AS BLOB));
INSERT INTO attempts VALUES ('db298a89b6694763ad86eba4ca4dae50', 'b:1', 'run~v000003', 'ACK', CAST('{"id":"db298a89b6694763ad86eba4ca4dae50","engine":"b:1","version":"run~v000003","started_at":"2026-11-21T20:22:37.630Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
df6a5442650db3b0' AS BLOB));
INSERT INTO attempts VALUES ('eb20515a5ab0492e95bbf4b12fcf5bb9', 'a:1', 'run~v000004', 'ACK', CAST('{"id":"eb20515a5ab0492e95bbf4b12fcf5bb9","engine":"a:1","version":"run~v000004","started_at":"2026-11-21T20:22:37.677Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
49684805ccc84e12' AS BLOB));
INSERT INTO attempts VALUES ('bea258aee8eb4a249c6d0756c9c89728', 'b:1', 'run~v000004', 'ACK', CAST('{"id":"bea258aee8eb4a249c6d0756c9c89728","engine":"b:1","version":"run~v000004","started_at":"2026-11-21T20:22:37.677Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
fb4d137cea00a3d8' AS BLOB));
INSERT INTO attempts VALUES ('7e92ebed48d648c098d3325c06f17ae3', 'a:1', 'run~v000006', 'ACK', CAST('{"id":"7e92ebed48d648c098d3325c06f17ae3","engine":"a:1","version":"run~v000006","started_at":"2026-11-21T20:22:37.843Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
0e6c04a0fac07b34' AS BLOB));
INSERT INTO attempts VALUES ('69d2ad3c689045bb9f97505d63bd0676', 'b:1', 'run~v000006', 'ACK', CAST('{"id":"69d2ad3c689045bb9f97505d63bd0676","engine":"b:1","version":"run~v000006","started_at":"2026-11-21T20:22:37.843Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
f70534dd06f8f01a' AS BLOB));
INSERT INTO attempts VALUES ('c948983ce668470b919138b3017aa030', 'a:1', 'run~v000004', 'ACK', CAST('{"id":"c948983ce668470b919138b3017aa030","engine":"a:1","version":"run~v000004","started_at":"2026-11-21T20:22:37.855Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
c6e9061789d2c2c1' AS BLOB));
INSERT INTO attempts VALUES ('0afc1f9489d74a6f9cbe524ea65565f2', 'b:1', 'run~v000004', 'ACK', CAST('{"id":"0afc1f9489d74a6f9cbe524ea65565f2","engine":"b:1","version":"run~v000004","started_at":"2026-11-21T20:22:37.855Z","outcome":"ACK","reason":null,"timings":{"load":1.0}}
929ff97abd314397' AS BLOB));
INSERT INTO attempts VALUES ('open', 'b:1', 'run~v000004', NULL, CAST('{"id":"open","engine":"b:1","version":"run~v000004","started_at":"2026-11-21T12:00:00.000Z","outcome":null,"reason":null,"timings":{}}
6aea45b19f7f7a07' AS BLOB));
INSERT INTO fingerprints VALUES ('run~v000001', 'simulated', 'contents of /srv/refitd/root/run/v000001');
INSERT INTO fingerprints VALUES ('run~v000002', 'simulated', 'contents of /srv/refitd/root/run/v000002');
INSERT INTO fingerprints VALUES ('run~v000003', 'simulated', 'contents of /srv/refitd/root/run/v000003');
INSERT INTO fingerprints VALUES ('run~v000004', 'simulated', 'contents of /srv/refitd/root/run/v000004');
INSERT INTO fingerprints VALUES ('run~v000006', 'simulated', 'contents of /srv/refitd/root/run/v000006');
INSERT INTO rollouts VALUES (1, 'run', 'run~v000001', CAST('{"number":1,"run":"run","version":"run~v000001","cause":"newest good version","started_at":"2026-11-21T20:22:37.544Z","state":"COMPLETE","check":"pending","reason":null,"paused_since":null}
1eae6e83c7dda84c' AS BLOB));
INSERT INTO rollouts VALUES (2, 'run', 'run~v000002', CAST('{"number":2,"run":"run","version":"run~v000002","cause":"newest good version","started_at":"2026-11-21T20:22:37.590Z","state":"COMPLETE","check":"pending","reason":null,"paused_since":null}
ddc2eda57ae517c4' AS BLOB));
INSERT INTO rollouts VALUES (3, 'run', 'run~v000003', CAST('{"number":3,"run":"run","version":"run~v000003","cause":"newest good version","started_at":"2026-11-21T20:22:37.630Z","state":"COMPLETE","check":"pending","reason":null,"paused_since":null}
ffa52e12eb004cbe' AS BLOB));
INSERT INTO rollouts VALUES (4, 'run', 'run~v000004', CAST('{"number":4,"run":"run","version":"run~v000004","cause":"newest good version","started_at":"2026-11-21T20:22:37.677Z","state":"COMPLETE","check":"pending","reason":null,"paused_since":null}
0ee7458c03ace22f' AS BLOB));
INSERT INTO rollouts VALUES (5, 'run', 'run~v000006', CAST('{"number":5,"run":"run","version":"run~v000006","cause":"newest good version","started_at":"2026-11-21T20:22:37.844Z","state":"ROLLED_BACK","check":"pending","reason":null,"paused_since":null}
9418d3bbba59bd4a' AS BLOB));
INSERT INTO rollouts VALUES (6, 'run', 'run~v000004', CAST('{"number":6,"run":"run","version":"run~v000004","cause":"rolled back from run~v000006","started_at":"2026-11-21T20:22:37.856Z","state":"COMPLETE","check":"pending","reason":null,"paused_since":null}
61a2cf3f0520280f' AS BLOB));
INSERT INTO events VALUES (1, 'a:1', CAST('{"seq":1,"at":"2026-11-21T20:22:37.519Z","kind":"engine","subject":"a:1","text":"added","data":{"state":"PROBING"}}
d54d832ed9f47258' AS BLOB));
INSERT INTO events VALUES (2, 'b:1', CAST('{"seq":2,"at":"2026-11-21T20:22:37.519Z","kind":"engine","subject":"b:1","text":"added","data":{"state":"PROBING"}}
e5687e55849dc658' AS BLOB));
INSERT INTO events VALUES (3, 'a:1', CAST('{"seq":3,"at":"2026-11-21T20:22:37.524Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves start-up weights","data":{"state":"IN_SYNC"}}
dd129c1271135f3f' AS BLOB));
INSERT INTO events VALUES (4, 'b:1', CAST('{"seq":4,"at":"2026-11-21T20:22:37.524Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves start-up weights","data":{"state":"IN_SYNC"}}
9dc0af922d26976c' AS BLOB));
INSERT INTO events VALUES (5, 'run~v000001', CAST('{"seq":5,"at":"2026-11-21T20:22:37.525Z","kind":"version","subject":"run~v000001","text":"found in the root","data":{"state":"ANNOUNCED","step":1,"run":"run"}}
39c31dba4c776944' AS BLOB));
INSERT INTO events VALUES (6, 'a:1', CAST('{"seq":6,"at":"2026-11-21T20:22:37.527Z","kind":"engine","subject":"a:1","text":"follows run run","data":{"state":"IN_SYNC"}}
e5dc690a1dfcb30c' AS BLOB));
INSERT INTO events VALUES (7, 'b:1', CAST('{"seq":7,"at":"2026-11-21T20:22:37.527Z","kind":"engine","subject":"b:1","text":"follows run run","data":{"state":"IN_SYNC"}}
60aa2cfe152f9506' AS BLOB));
INSERT INTO events VALUES (8, 'run~v000001', CAST('{"seq":8,"at":"2026-11-21T20:22:37.543Z","kind":"version","subject":"run~v000001","text":"sealed: 1361 bytes in good order","data":{"state":"SEALED","step":1,"run":"run"}}
9be75c6a165ee9cd' AS BLOB));
INSERT INTO events VALUES (9, 'a:1', CAST('{"seq":9,"at":"2026-11-21T20:22:37.543Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000001","data":{"state":"UPDATING"}}
540ea01d3e93eaa3' AS BLOB));
INSERT INTO events VALUES (10, 'b:1', CAST('{"seq":10,"at":"2026-11-21T20:22:37.544Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000001","data":{"state":"UPDATING"}}
686cf5b91ba4b31a' AS BLOB));
INSERT INTO events VALUES (11, 'run~v000001', CAST('{"seq":11,"at":"2026-11-21T20:22:37.544Z","kind":"rollout","subject":"run~v000001","text":"rollout 1 to run~v000001: newest good version","data":{"number":1,"state":"PENDING"}}
9c1310fa89434a16' AS BLOB));
INSERT INTO events VALUES (12, 'run~v000001', CAST('{"seq":12,"at":"2026-11-21T20:22:37.545Z","kind":"rollout","subject":"run~v000001","text":"rollout 1 to run~v000001: ROLLING","data":{"number":1,"state":"ROLLING"}}
151953093ce96e34' AS BLOB));
INSERT INTO events VALUES (13, 'a:1', CAST('{"seq":13,"at":"2026-11-21T20:22:37.551Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000001","data":{"state":"IN_SYNC"}}
076928603a11437a' AS BLOB));
INSERT INTO events VALUES (14, 'b:1', CAST('{"seq":14,"at":"2026-11-21T20:22:37.551Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000001","data":{"state":"IN_SYNC"}}
d58df1b55ee6bd23' AS BLOB));
INSERT INTO events VALUES (15, 'run~v000001', CAST('{"seq":15,"at":"2026-11-21T20:22:37.551Z","kind":"rollout","subject":"run~v000001","text":"rollout 1 to run~v000001: COMPLETE","data":{"number":1,"state":"COMPLETE"}}
79f35a379fff0fc1' AS BLOB));
INSERT INTO events VALUES (16, 'run~v000001', CAST('{"seq":16,"at":"2026-11-21T20:22:37.552Z","kind":"version","subject":"run~v000001","text":"served: step 1 is proven on every reachable engine","data":{"state":"SEALED","step":1,"run":"run"}}
7b3cb4e944249750' AS BLOB));
INSERT INTO events VALUES (17, 'run~v000002', CAST('{"seq":17,"at":"2026-11-21T20:22:37.576Z","kind":"version","subject":"run~v000002","text":"found in the root","data":{"state":"ANNOUNCED","step":2,"run":"run"}}
169e9470117e906d' AS BLOB));
INSERT INTO events VALUES (18, 'run~v000002', CAST('{"seq":18,"at":"2026-11-21T20:22:37.589Z","kind":"version","subject":"run~v000002","text":"sealed: 1361 bytes in good order","data":{"state":"SEALED","step":2,"run":"run"}}
8d34a61d9f15c6ba' AS BLOB));
INSERT INTO events VALUES (19, 'a:1', CAST('{"seq":19,"at":"2026-11-21T20:22:37.589Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000002","data":{"state":"UPDATING"}}
50f996d229da7347' AS BLOB));
INSERT INTO events VALUES (20, 'b:1', CAST('{"seq":20,"at":"2026-11-21T20:22:37.590Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000002","data":{"state":"UPDATING"}}
f724f57a24fdfe56' AS BLOB));
INSERT INTO events VALUES (21, 'run~v000002', CAST('{"seq":21,"at":"2026-11-21T20:22:37.590Z","kind":"rollout","subject":"run~v000002","text":"rollout 2 to run~v000002: newest good version","data":{"number":2,"state":"PENDING"}}
0561f3c191c90160' AS BLOB));
INSERT INTO events VALUES (22, 'run~v000002', CAST('{"seq":22,"at":"2026-11-21T20:22:37.590Z","kind":"rollout","subject":"run~v000002","text":"rollout 2 to run~v000002: ROLLING","data":{"number":2,"state":"ROLLING"}}
ca0c869f97b3d469' AS BLOB));
INSERT INTO events VALUES (23, 'a:1', CAST('{"seq":23,"at":"2026-11-21T20:22:37.594Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000002","data":{"state":"IN_SYNC"}}
acc4f9b112e52e59' AS BLOB));
INSERT INTO events VALUES (24, 'b:1', CAST('{"seq":24,"at":"2026-11-21T20:22:37.594Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000002","data":{"state":"IN_SYNC"}}
e2fbe987ad35499e' AS BLOB));
INSERT INTO events VALUES (25, 'run~v000002', CAST('{"seq":25,"at":"2026-11-21T20:22:37.594Z","kind":"rollout","subject":"run~v000002","text":"rollout 2 to run~v000002: COMPLETE","data":{"number":2,"state":"COMPLETE"}}
281b2ac36a1036aa' AS BLOB));
INSERT INTO events VALUES (26, 'run~v000002', CAST('{"seq":26,"at":"2026-11-21T20:22:37.595Z","kind":"version","subject":"run~v000002","text":"served: step 2 is proven on every reachable engine","data":{"state":"SEALED","step":2,"run":"run"}}
7ef9fd0dbdf6c3b4' AS BLOB));
INSERT INTO events VALUES (27, 'run~v000003', CAST('{"seq":27,"at":"2026-11-21T20:22:37.622Z","kind":"version","subject":"run~v000003","text":"found in the root","data":{"state":"ANNOUNCED","step":3,"run":"run"}}
c44addea77827218' AS BLOB));
INSERT INTO events VALUES (28, 'run~v000003', CAST('{"seq":28,"at":"2026-11-21T20:22:37.629Z","kind":"version","subject":"run~v000003","text":"sealed: 1361 bytes in good order","data":{"state":"SEALED","step":3,"run":"run"}}
c2819f199e0ef10b' AS BLOB));
INSERT INTO events VALUES (29, 'a:1', CAST('{"seq":29,"at":"2026-11-21T20:22:37.630Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000003","data":{"state":"UPDATING"}}
8f622af4857eaa18' AS BLOB));
INSERT INTO events VALUES (30, 'b:1', CAST('{"seq":30,"at":"2026-11-21T20:22:37.630Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000003","data":{"state":"UPDATING"}}
d6458999dc396968' AS BLOB));
INSERT INTO events VALUES (31, 'run~v000003', CAST('{"seq":31,"at":"2026-11-21T20:22:37.630Z","kind":"rollout","subject":"run~v000003","text":"rollout 3 to run~v000003: newest good version","data":{"number":3,"state":"PENDING"}}
fcb89cabafd7c465' AS BLOB));
INSERT INTO events VALUES (32, 'run~v000003', CAST('{"seq":32,"at":"2026-11-21T20:22:37.631Z","kind":"rollout","subject":"run~v000003","text":"rollout 3 to run~v000003: ROLLING","data":{"number":3,"state":"ROLLING"}}
bf8953172d93af69' AS BLOB));
INSERT INTO events VALUES (33, 'a:1', CAST('{"seq":33,"at":"2026-11-21T20:22:37.634Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000003","data":{"state":"IN_SYNC"}}
261d48dd379b5a72' AS BLOB));
INSERT INTO events VALUES (34, 'b:1', CAST('{"seq":34,"at":"2026-11-21T20:22:37.634Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000003","data":{"state":"IN_SYNC"}}
4113329aa843f826' AS BLOB));
INSERT INTO events VALUES (35, 'run~v000003', CAST('{"seq":35,"at":"2026-11-21T20:22:37.634Z","kind":"rollout","subject":"run~v000003","text":"rollout 3 to run~v000003: COMPLETE","data":{"number":3,"state":"COMPLETE"}}
48e28d0dc294b730' AS BLOB));
INSERT INTO events VALUES (36, 'run~v000003', CAST('{"seq":36,"at":"2026-11-21T20:22:37.635Z","kind":"version","subject":"run~v000003","text":"served: step 3 is proven on every reachable engine","data":{"state":"SEALED","step":3,"run":"run"}}
feee0034f657a4ec' AS BLOB));
INSERT INTO events VALUES (37, 'run~v000004', CAST('{"seq":37,"at":"2026-11-21T20:22:37.666Z","kind":"version","subject":"run~v000004","text":"found in the root","data":{"state":"ANNOUNCED","step":4,"run":"run"}}
93b1fa39acddfa7d' AS BLOB));
INSERT INTO events VALUES (38, 'run~v000004', CAST('{"seq":38,"at":"2026-11-21T20:22:37.676Z","kind":"version","subject":"run~v000004","text":"sealed: 1361 bytes in good order","data":{"state":"SEALED","step":4,"run":"run"}}
7b1bf06ae8f43e64' AS BLOB));
INSERT INTO events VALUES (39, 'a:1', CAST('{"seq":39,"at":"2026-11-21T20:22:37.677Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000004","data":{"state":"UPDATING"}}
e4959cae850a8206' AS BLOB));
INSERT INTO events VALUES (40, 'b:1', CAST('{"seq":40,"at":"2026-11-21T20:22:37.677Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000004","data":{"state":"UPDATING"}}
ac3a03d8b9bdabb7' AS BLOB));
INSERT INTO events VALUES (41, 'run~v000004', CAST('{"seq":41,"at":"2026-11-21T20:22:37.677Z","kind":"rollout","subject":"run~v000004","text":"rollout 4 to run~v000004: newest good version","data":{"number":4,"state":"PENDING"}}
27284352e0b7ae71' AS BLOB));
INSERT INTO events VALUES (42, 'run~v000004', CAST('{"seq":42,"at":"2026-11-21T20:22:37.678Z","kind":"rollout","subject":"run~v000004","text":"rollout 4 to run~v000004: ROLLING","data":{"number":4,"state":"ROLLING"}}
e652e23057b93f87' AS BLOB));
INSERT INTO events VALUES (43, 'a:1', CAST('{"seq":43,"at":"2026-11-21T20:22:37.681Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000004","data":{"state":"IN_SYNC"}}
79a9ad14fe6e98dd' AS BLOB));
INSERT INTO events VALUES (44, 'b:1', CAST('{"seq":44,"at":"2026-11-21T20:22:37.682Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000004","data":{"state":"IN_SYNC"}}
44cb726e13cb20e5' AS BLOB));
INSERT INTO events VALUES (45, 'run~v000004', CAST('{"seq":45,"at":"2026-11-21T20:22:37.682Z","kind":"rollout","subject":"run~v000004","text":"rollout 4 to run~v000004: COMPLETE","data":{"number":4,"state":"COMPLETE"}}
10df899869ab8e65' AS BLOB));
INSERT INTO events VALUES (46, 'run~v000004', CAST('{"seq":46,"at":"2026-11-21T20:22:37.682Z","kind":"version","subject":"run~v000004","text":"served: step 4 is proven on every reachable engine","data":{"state":"SEALED","step":4,"run":"run"}}
256ebd6620de21b6' AS BLOB));
INSERT INTO events VALUES (47, 'run~v000002', CAST('{"seq":47,"at":"2026-11-21T20:22:37.712Z","kind":"version","subject":"run~v000002","text":"pinned","data":{"state":"SEALED","step":2,"run":"run"}}
0bc38985d166e32a' AS BLOB));
INSERT INTO events VALUES (48, 'run~v000001', CAST('{"seq":48,"at":"2026-11-21T20:22:37.733Z","kind":"version","subject":"run~v000001","text":"retired: not one of the newest 2 good versions of run run, and nobody needs it","data":{"state":"RETIRED","step":1,"run":"run"}}
a6910162ddd93e9a' AS BLOB));
INSERT INTO events VALUES (49, 'run~v000001', CAST('{"seq":49,"at":"2026-11-21T20:22:37.749Z","kind":"version","subject":"run~v000001","text":"deleted","data":{"state":"DELETED","step":1,"run":"run"}}
2af73b9fca3a46bd' AS BLOB));
INSERT INTO events VALUES (50, 'run~v000005', CAST('{"seq":50,"at":"2026-11-21T20:22:37.783Z","kind":"version","subject":"run~v000005","text":"found in the root","data":{"state":"ANNOUNCED","step":5,"run":"run"}}
6caf6905568467e5' AS BLOB));
INSERT INTO events VALUES (51, 'run~v000005', CAST('{"seq":51,"at":"2026-11-21T20:22:37.792Z","kind":"version","subject":"run~v000005","text":"rejected: tensor layer.0.weight (F32 [4, 3]) is missing (the model is /srv/refitd/base): an engine would go on with its old values; publish every tensor, or say allow_missing in the notice","data":{"state":"REJECTED","step":5,"run":"run"}}
4a3f20c285a009a9' AS BLOB));
INSERT INTO events VALUES (52, 'run~v000006', CAST('{"seq":52,"at":"2026-11-21T20:22:37.831Z","kind":"version","subject":"run~v000006","text":"found in the root","data":{"state":"ANNOUNCED","step":6,"run":"run"}}
3ea3b178786fe830' AS BLOB));
INSERT INTO events VALUES (53, 'run~v000006', CAST('{"seq":53,"at":"2026-11-21T20:22:37.842Z","kind":"version","subject":"run~v000006","text":"sealed: 1361 bytes in good order","data":{"state":"SEALED","step":6,"run":"run"}}
fd33ce61a636daab' AS BLOB));
INSERT INTO events VALUES (54, 'a:1', CAST('{"seq":54,"at":"2026-11-21T20:22:37.843Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000006","data":{"state":"UPDATING"}}
08e94ec5af818752' AS BLOB));
INSERT INTO events VALUES (55, 'b:1', CAST('{"seq":55,"at":"2026-11-21T20:22:37.843Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000006","data":{"state":"UPDATING"}}
1589fbae2f5f3ec8' AS BLOB));
INSERT INTO events VALUES (56, 'run~v000006', CAST('{"seq":56,"at":"2026-11-21T20:22:37.844Z","kind":"rollout","subject":"run~v000006","text":"rollout 5 to run~v000006: newest good version","data":{"number":5,"state":"PENDING"}}
20cbda82cd733216' AS BLOB));
INSERT INTO events VALUES (57, 'run~v000006', CAST('{"seq":57,"at":"2026-11-21T20:22:37.844Z","kind":"rollout","subject":"run~v000006","text":"rollout 5 to run~v000006: ROLLING","data":{"number":5,"state":"ROLLING"}}
92d7bafe8d4a1b7d' AS BLOB));
INSERT INTO events VALUES (58, 'a:1', CAST('{"seq":58,"at":"2026-11-21T20:22:37.850Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000006","data":{"state":"IN_SYNC"}}
3db1812e32e8231c' AS BLOB));
INSERT INTO events VALUES (59, 'b:1', CAST('{"seq":59,"at":"2026-11-21T20:22:37.850Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000006","data":{"state":"IN_SYNC"}}
8030c97c360325dc' AS BLOB));
INSERT INTO events VALUES (60, 'run~v000006', CAST('{"seq":60,"at":"2026-11-21T20:22:37.851Z","kind":"rollout","subject":"run~v000006","text":"rollout 5 to run~v000006: COMPLETE","data":{"number":5,"state":"COMPLETE"}}
0e26d6cde1f8af1e' AS BLOB));
INSERT INTO events VALUES (61, 'run~v000006', CAST('{"seq":61,"at":"2026-11-21T20:22:37.851Z","kind":"version","subject":"run~v000006","text":"served: step 6 is proven on every reachable engine","data":{"state":"SEALED","step":6,"run":"run"}}
be695ea5613bfed6' AS BLOB));
INSERT INTO events VALUES (62, 'run~v000006', CAST('{"seq":62,"at":"2026-11-21T20:22:37.853Z","kind":"version","subject":"run~v000006","text":"barred: run run rolls back to run~v000004","data":{"state":"SEALED","step":6,"run":"run"}}
fd627c3aca286f8f' AS BLOB));
INSERT INTO events VALUES (63, 'run~v000005', CAST('{"seq":63,"at":"2026-11-21T20:22:37.853Z","kind":"version","subject":"run~v000005","text":"barred: run run rolls back to run~v000004","data":{"state":"REJECTED","step":5,"run":"run"}}
f6855675fa8fe0d8' AS BLOB));
INSERT INTO events VALUES (64, 'a:1', CAST('{"seq":64,"at":"2026-11-21T20:22:37.855Z","kind":"engine","subject":"a:1","text":"UPDATING: loads run~v000004","data":{"state":"UPDATING"}}
b71b3bcd4ee0bc45' AS BLOB));
INSERT INTO events VALUES (65, 'b:1', CAST('{"seq":65,"at":"2026-11-21T20:22:37.855Z","kind":"engine","subject":"b:1","text":"UPDATING: loads run~v000004","data":{"state":"UPDATING"}}
5b37816f628da318' AS BLOB));
INSERT INTO events VALUES (66, 'run~v000006', CAST('{"seq":66,"at":"2026-11-21T20:22:37.855Z","kind":"rollout","subject":"run~v000006","text":"rollout 5 to run~v000006 is ROLLED_BACK","data":{"number":5,"state":"ROLLED_BACK"}}
985c65c519b2219e' AS BLOB));
INSERT INTO events VALUES (67, 'run~v000004', CAST('{"seq":67,"at":"2026-11-21T20:22:37.856Z","kind":"rollout","subject":"run~v000004","text":"rollout 6 to run~v000004: rolled back from run~v000006","data":{"number":6,"state":"PENDING"}}
68481431d35b3f13' AS BLOB));
INSERT INTO events VALUES (68, 'run~v000004', CAST('{"seq":68,"at":"2026-11-21T20:22:37.856Z","kind":"rollout","subject":"run~v000004","text":"rollout 6 to run~v000004: ROLLING","data":{"number":6,"state":"ROLLING"}}
defdf270af060c73' AS BLOB));
INSERT INTO events VALUES (69, 'a:1', CAST('{"seq":69,"at":"2026-11-21T20:22:37.864Z","kind":"engine","subject":"a:1","text":"IN_SYNC: serves run~v000004","data":{"state":"IN_SYNC"}}
48f59f13a9c4a665' AS BLOB));
INSERT INTO events VALUES (70, 'b:1', CAST('{"seq":70,"at":"2026-11-21T20:22:37.864Z","kind":"engine","subject":"b:1","text":"IN_SYNC: serves run~v000004","data":{"state":"IN_SYNC"}}
1c5c2c8612e6f328' AS BLOB));
INSERT INTO events VALUES (71, 'run~v000004', CAST('{"seq":71,"at":"2026-11-21T20:22:37.864Z","kind":"rollout","subject":"run~v000004","text":"rollout 6 to run~v000004: COMPLETE","data":{"number":6,"state":"COMPLETE"}}
55f208bba73020f7' AS BLOB));
INSERT INTO deliveries VALUES (1, 'msg_1', 'WAITING', CAST('{"id":"msg_1","topic":"rollout.degraded","url":"https://ops.example.com/refitd","body":"{}","created_at":"2026-11-21T12:00:00.000Z","state":"WAITING","tries":2,"reason":"it answered 503","ended_at":null}
8b41ea09de83d52a' AS BLOB));
INSERT INTO deliveries VALUES (2, 'msg_2', 'DELIVERED', CAST('{"id":"msg_2","topic":"version.rejected","url":"https://ops.example.com/refitd","body":"{}","created_at":"2026-11-21T12:00:00.000Z","state":"DELIVERED","tries":1,"reason":null,"ended_at":"2026-11-21T12:00:01.000Z"}
aaf2558b1985884a' AS BLOB));
INSERT INTO origin VALUES (1, CAST('{"cause":null,"lost":false,"rebuilt":true,"root":null}
a3e4240c3cc921aa' AS BLOB));
