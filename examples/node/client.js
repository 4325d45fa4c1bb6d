// Look-aside load balancing: ask the router where to go, stream straight from the worker, release the reservation.
//
//   npm ci && node client.js [ROUTER] [PROMPT]
//
// The protos are loaded at run time from protos/ at the root of this repository; nothing is generated.
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';
import { fileURLToPath } from 'node:url';

const [router = 'localhost:50051', prompt = 'The capital of France is'] = process.argv.slice(2);

const protos = fileURLToPath(new URL('../../protos', import.meta.url));
const definition = protoLoader.loadSync(['rankway/v1/router.proto', 'rankway/v1/generate.proto'], {
  includeDirs: [protos],
  keepCase: true, // field names as in the protos
  longs: Number,
  enums: String,
  oneofs: true, // message.event tells which of its fields is set
});
const { Router, Generation } = grpc.loadPackageDefinition(definition).rankway.v1;
const credentials = grpc.credentials.createInsecure();

/** A unary call as a promise. */
const call = (client, method, request) =>
  new Promise((resolve, reject) =>
    client[method](request, { deadline: Date.now() + 10_000 }, (error, answer) => (error ? reject(error) : resolve(answer))));

/** Streams the completion from the worker that `route` names, and returns its usage. */
async function generate(route, sampling) {
  const worker = new Generation(route.endpoint, credentials);
  try {
    const stream = worker.Generate({
      request_id: route.request_id,
      reservation_id: route.reservation_id,
      token_ids: route.token_ids, // tokenised once, by the router
      dp_rank: route.dp_rank, // the global rank
      sampling,
    });
    let usage;
    for await (const message of stream) {
      if (message.event === 'delta') process.stdout.write(message.delta.text);
      if (message.event === 'finished') usage = message.finished.usage;
    }
    process.stdout.write('\n');
    return usage;
  } finally {
    worker.close();
  }
}

const client = new Router(router, credentials);
try {
  const sampling = { max_tokens: 16, temperature: 0 };
  const route = await call(client, 'Route', { request: { text: prompt, sampling } });
  console.log(`routed to ${route.worker_id} dp_rank=${route.dp_rank} at ${route.endpoint}, overlap ${route.overlap_blocks} blocks`);
  const usage = await generate(route, sampling);
  const { released } = await call(client, 'Release', { reservation_id: route.reservation_id });
  console.log(`${usage.prompt_tokens} prompt tokens, ${usage.cached_tokens} cached; ${usage.completion_tokens} generated; released: ${released}`);
} finally {
  client.close();
}
